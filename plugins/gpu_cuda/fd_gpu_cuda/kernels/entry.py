"""Compilation of kernels for every supported release of Triton."""

from __future__ import annotations

from functools import partial
from typing import Any

import triton

_OPTIONS = {"enable_fp_fusion": True}
"""Products and sums may be fused into one instruction, which rounds once.

The default differs between releases of Triton, which would change the last bits of results. Kernels that must have the
same bits use explicit instructions.
"""


def kernel(function: Any = None, **options: Any) -> Any:
    """Decorate a kernel like `triton.jit`, with `_OPTIONS` as defaults of its launches."""
    if function is None:
        return partial(kernel, **options)
    made = triton.jit(function, **options)
    launch = made.run
    made.run = lambda *arguments, **named: launch(*arguments, **(_OPTIONS | named))
    return made
