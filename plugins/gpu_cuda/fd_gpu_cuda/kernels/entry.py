"""Compilation and launch of kernels for every supported release of Triton."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton

_OPTIONS = {"enable_fp_fusion": True}
"""Products and sums may be fused into one instruction, which rounds once.

The default differs between releases of Triton, which would change the last bits of results. Kernels that must have the
same bits use explicit instructions.
"""
_TAKES_CONSTANTS = hasattr(triton, "knobs")
"""True if a compiled kernel takes all parameters of its function: from release 3.4 on."""


def cdiv(count: int, size: int) -> int:
    """Return how many pieces of a size hold a count; Triton's own function takes a microsecond, in every launch."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the least power of two that is not below a positive count."""
    return 1 << (count - 1).bit_length()


def kernel(function: Any = None, **options: Any) -> Any:
    """Decorate a kernel like `triton.jit`, with `_OPTIONS` as defaults of its launches.

    Launches pass constants by name and everything else by position.
    """
    if function is None:
        return partial(kernel, **options)
    made = triton.jit(function, **options)
    made.run = _Launcher(made)
    return made


class _Launcher:
    """Launches a kernel, and finds the compiled one for arguments like earlier ones in a third of Triton's time.

    For the one device of the process. The key is at least as fine as Triton's own: anything that may change what is
    compiled is in it, so an unknown key costs a lookup by Triton, and a known one is never another kernel's.
    """

    def __init__(self, made: Any) -> None:
        self._launch = made.run
        self._names: list[str] = made.arg_names
        self._name: str = made.fn.__name__
        self._known: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, *arguments: Any, grid: Any, warmup: bool = False, **named: Any) -> Any:
        key = *map(_kind, arguments), *named.items(), *map(type, named.values())
        found = self._known.get(key)
        if found is None or warmup:
            return self._look_up(key, arguments, named, grid, warmup=warmup)
        compiled, constants = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
        return compiled

    def _look_up(self, key: Any, arguments: Sequence[Any], named: dict[str, Any], grid: Any, *, warmup: bool) -> Any:
        """Have Triton find or compile the kernel, check it before its first launch, and launch it unless `warmup`.

        Raises `RuntimeError` if it was compiled wrongly.
        """
        options = _OPTIONS | named
        made = self._launch(*arguments, grid=grid, warmup=True, **options)
        if isinstance(made, triton.compiler.CompiledKernel) and (register := leaking_lane(made.asm["ptx"])):
            raise RuntimeError(
                f"Triton {triton.__version__} compiled {self._name} wrongly: an unused lane reaches {register}"
            )
        if warmup:
            return made
        made = self._launch(*arguments, grid=grid, warmup=False, **options)
        left = self._names[len(arguments) :]
        complete = isinstance(made, triton.compiler.CompiledKernel) and named.keys() >= {*left}
        if _TAKES_CONSTANTS and complete:
            self._known[key] = made, tuple(named[name] for name in left)
        return made


def _kind(argument: Any) -> Any:
    """Return what a kernel may be compiled for: types, alignment to 16 bytes, and of integers 1, multiples and size."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        magnitude = argument if argument >= 0 else ~argument
        return type(argument), argument == 1, argument % 16 == 0, magnitude.bit_length() // 32
    return type(argument)


_WIDE = re.compile(r"mul\.wide\.[us]32\s+(%rd\d+), %r\d+, (\d+);")
_UNUSED_FROM = 1 << 22
"""Factor of an index of one of 1,024 threads whose product needs more than 32 bits: nothing uses it."""


def leaking_lane(ptx: str) -> str:
    """Return a register of two packed 32-bit integers into whose upper half the unused lower one reaches, "" if none.

    With the LLVM of Triton 3.6, wrong code: two indices are computed as one vector, whose unused lane is shifted by 31
    bits. The lane becomes a 64-bit product, which the other lane is then joined with.
    """
    wide = {found[1] for found in _WIDE.finditer(ptx) if int(found[2]) >= _UNUSED_FROM}
    if not wide:
        return ""
    joined = re.finditer(r"or\.b64\s+(%rd\d+), (%rd\d+), (%rd\d+);", ptx)
    return next((found[1] for found in joined if {found[2], found[3]} & wide), "")
