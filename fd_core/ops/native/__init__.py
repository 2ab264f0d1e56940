"""Fused operations in C++ for the CPU: compiled on first use, called through ctypes, checked against the numpy pack."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fd_core.ops.native.pack import NativeOps


logger = logging.getLogger(__name__)


def load_native_ops(dtype: str | None, threads: int) -> NativeOps | None:
    """Return the native pack, or None, with a log line, if its library cannot be built or used.

    `dtype` is `float32` or `bfloat16`; None selects `bfloat16`, which is faster even if it has to be widened.
    """
    try:
        from fd_core.ops.native.build import BuildError, load
        from fd_core.ops.native.library import declare
    except ImportError as error:  # such as fcntl outside Unix
        logger.warning("native kernels are unavailable, using slower ones of torch: %s", error)
        return None
    try:
        library = declare(load())
    except BuildError as error:
        logger.warning("native kernels are unavailable, using slower ones of torch: %s", error)
        return None
    from fd_core.ops.native.pack import NativeOps

    return NativeOps(library, dtype or "bfloat16", threads)
