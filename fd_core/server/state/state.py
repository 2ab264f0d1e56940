"""What the handlers of one server share, and who may still enter."""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass, field

from fastapi import Request

import fd_core
from fd_core.config import ServerConfig
from fd_core.engine.clients.client import EngineClient
from fd_core.http.access.control import AccessControl
from fd_core.http.bodies import BodyBudget
from fd_core.http.draining import Drain
from fd_core.http.errors import ApiError, unavailable
from fd_core.http.spans import RequestSpans
from fd_core.http.supervision import Supervisor
from fd_core.server.batches.service import BatchService
from fd_core.server.preprocess.known_fields import UnknownFieldLog
from fd_core.server.responses.store import ResponseStore
from fd_core.server.state.active import ActiveRequests
from fd_core.server.state.grammars import GrammarChecker
from fd_core.server.state.metrics import ServerMetrics
from fd_core.text.parsing.answer import Parsers
from fd_core.text.prompt_reader import PromptReader
from fd_core.text.tokenizer import Tokenizer

__all__ = ["ServerState", "state_of"]


@dataclass
class ServerState:
    """The engine, or the engines, behind one HTTP server."""

    config: ServerConfig
    client: EngineClient
    tokenizer: Tokenizer
    prompt_reader: PromptReader
    metrics: ServerMetrics
    grammars: GrammarChecker
    parsers: Parsers = field(default_factory=Parsers)
    """How answers of this model are read."""
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(0))
    """Answers of the Responses API that are kept."""
    active: ActiveRequests = field(default_factory=ActiveRequests)
    created: int = field(default_factory=lambda: int(time.time()))
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names this process, so that a router notices another one at the same address."""
    ticket_key: bytes | None = None
    """Authenticates the tickets with which a router assigns prompts to prefill workers; None unless this is a decode
    worker."""
    batches: BatchService | None = None
    """Keeps files and runs batches; None if that is turned off."""
    supervisor: Supervisor = field(default_factory=Supervisor)
    """Runs the background tasks."""
    drain: Drain = field(default_factory=Drain)
    access: AccessControl = field(default_factory=AccessControl)
    """The API keys and what they may take."""
    spans: RequestSpans | None = None
    """Makes the spans of requests; None makes none."""
    unknown_fields: UnknownFieldLog = field(default_factory=UnknownFieldLog)
    bodies: BodyBudget = field(init=False)
    """Memory for bodies that are being received."""

    def __post_init__(self) -> None:
        self.bodies = BodyBudget(self.config.max_body_memory)

    @property
    def context(self) -> int:
        """Most tokens of prompt and text together."""
        return self.client.info.max_model_len

    @property
    def max_n(self) -> int:
        """Texts that one request may ask for."""
        return self.config.max_n

    @property
    def trusts_templates(self) -> bool:
        """Whether requests may bring a template."""
        return self.config.trust_request_chat_template

    @property
    def incarnation(self) -> str:
        """Names this process and its engine's start: whoever answers under another name has an empty cache."""
        return f"{self.instance}.{self.client.info.epoch}"

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: equal where equal requests with a seed get equal texts."""
        info = self.client.info
        forms = sorted({use.computed for use in info.weights})
        adapters = [adapter.digest for adapter in info.adapters]
        computing = (fd_core.__version__, info.model, info.num_parameters, info.backend, info.device, info.dtype, forms)
        return f"fp_{hashlib.blake2b(repr((computing, adapters)).encode(), digest_size=6).hexdigest()}"

    @property
    def base_names(self) -> tuple[str, ...]:
        """Names under which the model itself answers, the main one first."""
        return self.config.served_model_names or (self.client.info.model,)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which the model answers, the main one first, and those of its adapters."""
        own = self.base_names
        return (*own, *(adapter.name for adapter in self.client.info.adapters if adapter.name not in own))

    def adapter(self, asked: str | None) -> str:
        """Return the digest of the adapter that a name stands for, empty for the model's own names."""
        if not asked or asked in self.base_names:
            return ""
        return next((adapter.digest for adapter in self.client.info.adapters if adapter.name == asked), "")

    def model_name(self, asked: str | None) -> str:
        """Return the name to answer under; `ApiError` (404) for a model that is not served."""
        names = self.model_names
        if not asked:
            return names[0]
        if asked not in names:
            raise ApiError(
                404,
                f"the model {asked[:128]!r} does not exist; served here: {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return asked

    @property
    def degraded(self) -> str:
        """What is missing while requests are served: engines, background tasks; empty if nothing is."""
        return "; ".join(filter(None, (self.client.missing, self.supervisor.failing)))

    def not_ready(self) -> str | None:
        """Say why requests are refused, or return None if they are served."""
        if self.drain.leaving:
            return "the server is shutting down"
        return None if self.client.alive else self.client.missing

    def admit(self, count: int) -> None:
        """Raise `ApiError` (503) if `count` more generations cannot be taken, 400 if none ever is."""
        if self.client.info.role == "prefill":
            raise ApiError(
                400,
                "this prefill worker only computes prompts; send requests to a decode worker or to the router",
                code="prefill_worker",
            )
        if not self.client.alive:
            raise unavailable(self.client.missing, "engine_dead", retry_after=5)
        queue = self.config.max_queued_requests
        if self.client.active_requests + count > self.client.info.max_num_seqs + queue:
            raise unavailable(
                f"the queue holds {queue} requests and has no room for {count} more", "queue_full", retry_after=1
            )


def state_of(request: Request) -> ServerState:
    """Return the state that the application was assembled with."""
    state: ServerState = request.app.state.fd
    return state
