"""Compilation reports of a pack that compiles kernels on their first call."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fd_core.types.metrics import counter

_KERNELS = "Kernels compiled or loaded from a cache folder; those after the warm-up delay steps."
_SECONDS = "Time spent compiling and loading kernels."
_START, _SERVING = {"phase": "start"}, {"phase": "serving"}


class CompilationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels that a pack compiled so far, before `Ops.warmed_up` and since; monotonic within an epoch."""

    start: Annotated[int, counter("kernel_compilations", _KERNELS, labels=_START)] = 0
    serving: Annotated[int, counter("kernel_compilations", _KERNELS, labels=_SERVING)] = 0
    start_seconds: Annotated[float, counter("kernel_compilation_seconds", _SECONDS, labels=_START)] = 0.0
    serving_seconds: Annotated[float, counter("kernel_compilation_seconds", _SECONDS, labels=_SERVING)] = 0.0
