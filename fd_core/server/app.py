"""Assembly of the application."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException

import fd_core
from fd_core.config import ServerConfig
from fd_core.config.paths import find_cache_dir
from fd_core.engine.clients.client import EngineClient
from fd_core.errors import ConfigError, FdError
from fd_core.http.access.control import AccessControl
from fd_core.http.bodies import BodyBudget
from fd_core.http.connections.connections import ConnectionStats
from fd_core.http.errors import ApiError
from fd_core.http.hosts import HostRules
from fd_core.http.spans import RequestSpans
from fd_core.http.supervision import Supervisor
from fd_core.models.families.image_processor import ImageProcessor
from fd_core.server.api import admin, completions, control, embeddings, models, openapi
from fd_core.server.batches import routes
from fd_core.server.batches.service import BatchService
from fd_core.server.batches.store import BatchStore
from fd_core.server.gate import Gate, handle_error
from fd_core.server.messages import routes as messages
from fd_core.server.ollama import routes as ollama
from fd_core.server.preprocess.media.reader import ImageReader
from fd_core.server.responses import routes as responses
from fd_core.server.state import GrammarChecker, ResponseStore, ServerMetrics, ServerState
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.parsing.answer import Parsers
from fd_core.text.prompt_reader import PromptReader
from fd_core.text.tokenizer import Tokenizer


def create_app(
    config: ServerConfig,
    client: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    ticket_key: bytes | None = None,
    parsers: Parsers | None = None,
    spans: RequestSpans | None = None,
    connections: ConnectionStats | None = None,
    images: ImageProcessor | None = None,
) -> FastAPI:
    """Return the ASGI application over one engine; its shared state is `app.state.fd`, a `ServerState`.

    `images` is the model's processor of images, if it takes images.
    """
    app = FastAPI(title="fd_core", version=fd_core.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    names = config.served_model_names or (client.info.model,)
    if taken := [adapter.name for adapter in client.info.adapters if adapter.name in names]:
        hint = "rename the adapter, or the model with --served-model-name"
        raise ConfigError(f"the adapter {taken[0]!r} has the same name as the model", field="--lora-modules", hint=hint)
    access = AccessControl(config)
    bodies, supervisor = BodyBudget(config.max_body_memory), Supervisor()
    metrics = ServerMetrics(
        client,
        names[0] if config.metrics_names == "vllm" else None,
        refusals=access.refusals,
        counters=(connections or ConnectionStats(), bodies.stats, supervisor.stats),
    )
    info = client.info
    longest = info.max_model_len * tokenizer.longest_token
    reader = PromptReader(tokenizer, template, vocab_size=info.vocab_size, max_chars=longest, images=images)
    grammars = GrammarChecker(tokenizer, info)
    batches = None
    if config.batch_api:
        folder = find_cache_dir() / "batches" if config.batch_store is None else Path(config.batch_store).expanduser()
        batches = BatchService(
            app,
            partial(
                BatchStore, folder, config.batch_store_limit, config.batch_store_key_limit, lambda: len(access.ring)
            ),
            folder,
            supervisor=supervisor,
            longest=config.max_body_bytes,
            at_once=max(1, info.max_num_seqs // 2),  # the other slots are for requests that wait for their answer
        )
    state = ServerState(
        config,
        client,
        tokenizer,
        prompt_reader=reader,
        metrics=metrics,
        grammars=grammars,
        bodies=bodies,
        parsers=parsers or Parsers(),
        responses=ResponseStore(config.response_store),
        ticket_key=ticket_key,
        batches=batches,
        supervisor=supervisor,
        access=access,
        spans=spans,
        images=None if images is None else ImageReader(images, reader.image_thread, config, bodies),
    )
    app.state.fd = state
    families = [
        messages,
        responses,
        ollama,
        completions,
        embeddings,
        models,
        admin,
        control,
        *([routes] if config.batch_api else []),
    ]
    for router in (completions.chat_router, *(family.router for family in families)):
        app.router.routes += router.routes  # not `include_router`, which adds lookups to each request
    for kind in (ApiError, FdError, HTTPException):
        app.add_exception_handler(kind, handle_error)
    hosts = HostRules(config.host, config.allowed_hosts, config.allowed_origins)
    app.add_middleware(Gate, state=state, hosts=hosts)
    openapi.install(app, keys_required=access.has_keys)
    return app
