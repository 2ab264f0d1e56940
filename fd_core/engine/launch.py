"""Opens an engine where the settings want it: in a process of its own, or in a thread."""

from __future__ import annotations

from pathlib import Path

from fd_core.config import EngineConfig
from fd_core.engine.client import EngineClient, StartProgress
from fd_core.errors import ConfigError

__all__ = ["open_client"]


async def open_client(
    config: EngineConfig, path: Path | None, *, where: str = "process", progress: StartProgress | None = None
) -> EngineClient:
    """Start an engine for the checkpoint at `path` and return a client once it is ready.

    `where` is `process` or `inproc`; `path` is None only for backends that need no checkpoint. Raises what loading
    raises: `ConfigError`, `ModelError`, `PluginError`.
    """
    report = progress or (lambda *_: None)
    if where == "inproc":
        from fd_core.engine.inproc import InprocClient

        return await InprocClient.open(config, path, report)
    if where == "process":
        from fd_core.engine.process import ProcessClient

        return await ProcessClient.open(config, path, report)
    raise ConfigError(f"an engine runs in `process` or `inproc`, not in {where!r}", field="--engine")
