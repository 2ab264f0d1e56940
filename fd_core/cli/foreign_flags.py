"""Flags of vLLM that are not served under their names: they are refused with what there is in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import typer
from typer.core import TyperCommand

from fd_core.cli.report import say
from fd_core.errors import ConfigError

__all__ = ["ServingCommand"]

_NO_PROMPTS: Final = "prompts are never logged; --access-log logs one line for each request"
_IN_PLACE: Final[Mapping[str, str]] = {
    "--disable-log-requests": _NO_PROMPTS,
    "--disable-uvicorn-access-log": "requests are logged only where --access-log is given",
    "--enable-auto-tool-choice": "models whose calls --tool-call-parser can read choose tools without it",
    "--enable-chunked-prefill": "prompts are always computed in parts, of at most --max-num-batched-tokens",
    "--enable-log-requests": _NO_PROMPTS,
    "--kv-transfer-config": "--role and --kv-connector say how workers hand KV over",
    "--num-gpu-blocks-override": "--num-kv-blocks is the number of KV blocks",
    "--swap-space": "--host-kv-memory is the memory for KV outside the device, as in --host-kv-memory 4Gi",
    "--trust-remote-code": "code that comes with a model is never run",
    "--uvicorn-log-level": "--log-level is that of the whole server",
}


class ServingCommand(TyperCommand):
    """A command for which people have flags of another server at hand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, unless it has a flag of the other server."""
        for flag in (arg.partition("=")[0] for arg in args):
            if flag in _IN_PLACE:
                say(ConfigError(f"it is not a flag of fdcore: {_IN_PLACE[flag]}", field=flag))
                raise typer.Exit(ConfigError.exit_code)
        return super().parse_args(ctx, args)
