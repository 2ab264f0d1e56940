"""`fdcore serve`: an OpenAI-compatible server over one model."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fd_core.cli.report import STARTED, interrupts_end_it, outlive_hangups, reports_errors
from fd_core.cli.settings.flags import CONFIG_FILE, ENGINE_FLAGS, SERVER_FLAGS, Given, takes_flags
from fd_core.errors import EngineDead

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable

    from fd_core.cli.settings.settings import Settings
    from fd_core.config import EngineConfig
    from fd_core.engine.clients.client import EngineClient
    from fd_core.http.spans import RequestSpans


log = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.5
"""Interval at which an engine is checked for a permanent failure, in seconds."""


@reports_errors
@takes_flags(ENGINE_FLAGS, SERVER_FLAGS, (CONFIG_FILE,))
def serve(
    given: Given,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="smollm2, a folder, a .gguf file or a Hugging Face name.")
    ] = None,
) -> None:
    """Serve MODEL with an OpenAI-compatible API.

    Every setting may also be given as an environment variable (FD_MAX_NUM_SEQS for --max-num-seqs) or in the TOML
    file of --config; flags win over the environment, the environment over the file.
    """
    from fd_core.cli.models.models import choose_model
    from fd_core.cli.settings.settings import merge

    settings = merge(model, given, os.environ, ask_model=lambda: choose_model("fdcore serve"))
    outlive_hangups(settings.server.api_key_file)
    # Processes that are started from here do not need the secret.
    os.environ.pop("FD_API_KEY", None)
    # The engine's process reads the log settings from its environment.
    os.environ |= {
        "FD_LOG_LEVEL": settings.server.log_level,
        "FD_LOG_FORMAT": settings.server.log_format,
        "FD_ACCESS_LOG": "1" if settings.server.access_log else "0",
    }

    with interrupts_end_it():
        import asyncio

        from fd_core.config.logs import configure_logs
        from fd_core.http.connections.listening import bind_socket, raise_descriptor_limit

        importlib.import_module("fd_core.engine.process.engine_process")
        runner = asyncio.Runner(loop_factory=loop_factory())

    configure_logs(settings.server.log_level, settings.server.log_format, access=settings.server.access_log)
    if settings.server.log_level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
    raise_descriptor_limit()
    with bind_socket(settings.server.host, settings.server.port) as listener, runner:
        runner.run(_serve(settings, listener))


def opened_spans(endpoint: str | None, service: str, stack: contextlib.ExitStack) -> RequestSpans | None:
    """Return the exporter of spans, until `stack` closes; None without an endpoint. Raises `ConfigError`."""
    if endpoint is None:
        return None
    from fd_core.http.spans import open_spans

    spans = open_spans(endpoint, service)
    stack.callback(spans.close)
    return spans


async def _serve(settings: Settings, listener: socket.socket) -> None:
    import asyncio

    from fd_core.engine.process.engine_process import prestarted_process

    server, where, engines = settings.server, settings.server.engine, settings.server.data_parallel_size
    async with contextlib.AsyncExitStack() as stack:
        # The engine's process imports its framework while this one imports the following and finds the model.
        alone = where == "process" and engines == 1
        prestarted = await stack.enter_async_context(prestarted_process(settings.engine.backend, wanted=alone))

        from rich.console import Console

        from fd_core.cli.serving.startup import check_folders, choose_parsers, find_model, running_engine, startup_bars
        from fd_core.cli.serving.summary import brief, show_brief, show_summary, summary
        from fd_core.http.connections.listening import bind_socket, settle
        from fd_core.http.connections.tls import ServingTls
        from fd_core.http.hosts import HostRules
        from fd_core.launching.announcing import announce

        # Unusable settings are reported before anything is fetched or loaded.
        ServingTls.of(server)
        HostRules(server.host, server.allowed_hosts, server.allowed_origins)
        names = (server.tool_call_parser, server.reasoning_parser)
        choose_parsers(*names, template=None, architecture="")
        check_folders(settings)
        if settings.engine.role == "prefill":
            given = settings.engine.transfer_host, settings.engine.transfer_port
            bind_socket(*given, flag="--transfer-port", host_flag="--transfer-host").close()
        closing = stack.enter_context(contextlib.ExitStack())
        spans = opened_spans(server.otlp_traces_endpoint, "fdcore-serve", closing)
        console = Console(stderr=True)
        with startup_bars(console) as bars:
            model = await asyncio.to_thread(find_model, settings.engine, server.chat_template, bars)
            serving = asyncio.create_task(asyncio.to_thread(importlib.import_module, "fd_core.server.serve"))
            client = await stack.enter_async_context(
                running_engine(model, where, bars, engines=engines, prestarted=prestarted)
            )
        chosen = choose_parsers(*names, model.template, client.info.architecture)

        def ready(url: str) -> None:
            rows = summary(client.info, server, url, tools=chosen.tools, reasoning=chosen.reasoning)
            if server.verbose:
                show_summary(console, rows)
            else:
                seconds = time.monotonic() - STARTED
                has_template = model.template is not None
                show_brief(console, brief(rows, client.info, server, url, chat=has_template, seconds=seconds))
            settle()
            announce(url)

        stop = asyncio.Event()
        watching = asyncio.create_task(_stop_when_failed(client, stop))
        closing.callback(watching.cancel)
        await (await serving).serve_http(
            server,
            client,
            model.tokenizer,
            template=model.template,
            ticket_key=_ticket_key(settings.engine),
            parsers=chosen.parsers,
            spans=spans,
            images=model.images,
            sock=listener,
            on_ready=ready,
            stop=stop,
        )
        if any(engine.permanently_failed for engine in client.engines):
            raise EngineDead(f"the server exited because {client.missing}")


async def _stop_when_failed(client: EngineClient, stop: asyncio.Event) -> None:
    """Set `stop` once a dead engine will not be replaced: the supervisor of the server restarts it."""
    import asyncio

    while not any(engine.permanently_failed for engine in client.engines):
        await asyncio.sleep(_POLL_SECONDS)
    log.error("an engine failed permanently: the server drains and exits, requests on other engines may finish")
    stop.set()


def _ticket_key(engine: EngineConfig) -> bytes | None:
    """Return the key of the transfer tickets that a router sends; None unless the role is `decode`."""
    if engine.role != "decode":
        return None
    from fd_core.disagg.keys import ticket_key

    return ticket_key(engine.transfer_secret_file)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
