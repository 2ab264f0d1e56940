"""Compilation of functions that are launched, for every supported release of Triton."""

from __future__ import annotations

from functools import partial
from typing import Any

import triton

_OPTIONS = {"enable_fp_fusion": True}
"""Products and sums of numbers may become one instruction, which rounds once.

Releases of Triton differ in what they do where nothing is said, and so would results in their last bits. Where two
kernels must give the same bits, they name the instruction themselves.
"""


def kernel(function: Any = None, **options: Any) -> Any:
    """Be `triton.jit` for a function that is launched with `_OPTIONS`, unless a launch says otherwise."""
    if function is None:
        return partial(kernel, **options)
    made = triton.jit(function, **options)
    launch = made.run
    made.run = lambda *arguments, **named: launch(*arguments, **(_OPTIONS | named))
    return made
