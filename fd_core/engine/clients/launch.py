"""Opens engines as configured: in separate processes, or one in a thread."""

from __future__ import annotations

from pathlib import Path

from fd_core.config import EngineConfig
from fd_core.engine.clients.client import EngineClient, StartProgress
from fd_core.engine.process.engine_process import EngineProcess
from fd_core.errors import ConfigError


async def open_client(
    config: EngineConfig,
    path: Path | None,
    *,
    where: str = "process",
    engines: int = 1,
    progress: StartProgress | None = None,
    prestarted: EngineProcess | None = None,
) -> EngineClient:
    """Start engines for the checkpoint at `path` and return their client once all are ready.

    `where` is `process` or `inproc`; `path` is None only for backends that need no checkpoint. `prestarted` is a
    process for the one engine, if the caller started one while finding the model. Raises the errors of loading:
    `ConfigError`, `ModelError`, `PluginError`.
    """
    report = progress or (lambda *_: None)
    if engines > 1:
        if where == "inproc":
            raise ConfigError(
                "several engines require separate processes", field="--data-parallel-size", hint="remove --engine"
            )
        from fd_core.engine.clients.data_parallel import open_engines

        return await open_engines(config, path, report, count=engines)
    if where == "inproc":
        from fd_core.engine.clients.inproc import InprocClient

        return await InprocClient.open(config, path, report)
    if where == "process":
        from fd_core.engine.clients.process import ProcessClient

        return await ProcessClient.open(config, path, report, prestarted=prestarted)
    raise ConfigError(f"unknown engine placement {where!r}; expected `process` or `inproc`", field="--engine")
