"""Messages between a server and its grammar processes, over `fd_core.launching.message_stream`."""

from __future__ import annotations

from typing import Final

import msgspec

INVALID: Final = "invalid_grammar"
"""Error code of invalid output constraints."""
CPU_SECONDS: Final = 2
"""Limit of the CPU time of one task, enforced by the system with a resolution of one second."""


class Unenforced(msgspec.Struct, frozen=True):
    """A part of a schema that an answer may violate."""

    param: str
    """Its location in the request."""
    message: str


class ConstraintOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a task: a grammar that can be compiled, or the reason why there is none."""

    grammar: str = ""
    warnings: tuple[Unenforced, ...] = ()
    cpu_seconds: float = 0.0
    message: str = ""
    """Human-readable reason why there is no grammar; empty if there is one."""
    field: str | None = None
    code: str | None = None
