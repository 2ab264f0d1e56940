"""Weights of linear layers, packed for the kernels."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fd_core.ops.native.library import PackedForm, checked
from fd_core.ops.native.program import Runtime
from fd_core.ops.weights import LowRank, PackedTensor, RawTensor, Weight

_TYPE_CODES = {"F32": 0, "BF16": 1, "F16": 2}


class Arena:
    """Memory that the weights of a pack live in; freed when the last of them goes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.handle = checked(library.fd_arena_new(), "weights")

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.fd_arena_free(self.handle)


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A packed linear."""

    handle: Any
    width: int
    """Columns of the result: of gate alone where gate and up are interleaved."""
    inputs: int
    arena: Arena


@dataclass(frozen=True, slots=True)
class NativeLora:
    """What one adapter adds to a linear, as `fd::LoraDelta` has it."""

    down: NativeLinear
    """[sum of ranks, in]"""
    up: NativeLinear
    """[out, rank of a part], in the order of the linear; of all parts, with zeros, where one ends inside a vector."""
    starts: tuple[int, ...]
    """The column of `down` that each part begins at; -1 for a part that is left alone."""
    outs: tuple[int, ...]
    """Columns of each part."""


def pack_lora(
    runtime: Runtime, arena: Arena, parts: Sequence[LowRank | None], outs: Sequence[int], *, gated: bool
) -> NativeLora:
    """Copy what an adapter adds to a linear whose parts have `outs` columns into the order that the kernels read."""
    there = [part for part in parts if part is not None]
    # Ranks are even, since elements of bfloat16 are multiplied in pairs.
    rank = max(len(part.down) for part in there)
    rank += rank % 2
    downs = [_filled(part.down, rank, part.down.shape[1]) for part in there]
    places = [
        -1 if part is None else rank * sum(each is not None for each in parts[:i]) for i, part in enumerate(parts)
    ]
    nothing = np.zeros((0, 0), np.float32)
    ups = [_filled(nothing if each is None else each.up, out, rank) for each, out in zip(parts, outs, strict=True)]
    if not gated and any(end % runtime.lanes for end in np.cumsum(outs)[:-1]):
        whole = np.zeros((sum(outs), rank * len(there)), np.float32)
        for of_part, start, end in zip(ups, places, np.cumsum(outs), strict=True):
            if start >= 0:
                whole[end - len(of_part) : end, start : start + rank] = of_part
        ups, places, outs = [whole], [0], [sum(outs)]
    down, up = (
        pack(runtime, arena, [RawTensor("F32", each) for each in weights], None, gated=of_gate)
        for weights, of_gate in ((downs, False), (ups, gated))
    )
    return NativeLora(down, up, tuple(places), tuple(outs))


def _filled(values: npt.NDArray[np.float32], rows: int, columns: int) -> npt.NDArray[np.float32]:
    """Return the values with zeros behind them."""
    return np.pad(values, ((0, rows - values.shape[0]), (0, columns - values.shape[1])))


def pack(
    runtime: Runtime,
    arena: Arena,
    parts: Sequence[Weight],
    biases: Sequence[RawTensor] | None,
    *,
    gated: bool,
) -> NativeLinear:
    """Copy weights [out_i, in] and biases [out_i] into the order that the kernels read."""
    library = runtime.library
    inputs = parts[0].shape[1]
    width = parts[0].shape[0] if gated else sum(part.shape[0] for part in parts)
    form = _form_of(parts)
    shape = (arena.handle, width, inputs, gated)
    if form is None:
        handle = checked(library.fd_linear_new(*shape, runtime.type_code, biases is not None), "weights")
    else:
        handle = checked(library.fd_packed_new(*shape, ctypes.byref(form), biases is not None), "weights")
    column = 0
    for i, part in enumerate(parts):
        # With gate and up, `i` tells them apart; other parts follow each other.
        place = (i, 0) if gated else (0, column)
        if isinstance(part, PackedTensor) and form is not None:
            dtype = np.float16 if form.half else np.float32
            minima = None if part.minima is None else np.ascontiguousarray(part.minima, dtype)
            values, scales = np.ascontiguousarray(part.values), np.ascontiguousarray(part.scales, dtype)
            addresses = (values.ctypes.data, scales.ctypes.data, None if minima is None else minima.ctypes.data)
            library.fd_packed_pack(handle, *place, *addresses, part.group, part.shape[0], runtime.team)
        else:
            whole = part.expanded()
            data = np.ascontiguousarray(whole.data)
            code = _TYPE_CODES[whole.dtype]
            library.fd_linear_pack(handle, *place, data.ctypes.data, code, part.shape[0], runtime.team)
        if biases is not None:
            bias = np.ascontiguousarray(biases[i].data)
            library.fd_linear_bias(handle, *place, bias.ctypes.data, _TYPE_CODES[biases[i].dtype], bias.size)
        column += part.shape[0]
    return NativeLinear(handle, width, inputs, arena)


def _form_of(parts: Sequence[Weight]) -> PackedForm | None:
    """Return the form that holds all parts exactly; None where they must be expanded."""
    packed = [part for part in parts if isinstance(part, PackedTensor)]
    group = math.gcd(*(part.group for part in packed))
    if len(packed) < len(parts) or (group != parts[0].shape[1] and group % 32 != 0 and group != 16):
        return None
    signed = {part.bits == 8 or part.minima is None for part in packed}
    minima = [part.minima for part in packed if part.minima is not None]
    half = all(_is_half(factors) for factors in (*(part.scales for part in packed), *minima))
    if all(part.bits == 4 for part in packed) and len(signed) == 1:
        return PackedForm(4, group, 8 if signed == {True} else 0, bool(minima), half)
    return PackedForm(8, group, 128, bool(minima), half)


def _is_half(values: npt.NDArray[np.float32]) -> bool:
    """Say whether half precision holds the values exactly."""
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16) == values).all())
