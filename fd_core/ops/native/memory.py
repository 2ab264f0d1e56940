"""Weights of linear layers, and the paged KV cache, in the kernels' layout."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import KVCache, KVShape
from fd_core.ops.native.library import PackedForm, checked
from fd_core.ops.native.program import Runtime
from fd_core.ops.weights import MXFP4, UNIT_SPAN, LowRank, PackedTensor, RawTensor, Weight
from fd_core.types import IntArray

_Floats = npt.NDArray[np.float32]

_TYPE_CODES = {"F32": 0, "BF16": 1, "F16": 2}
_SCALE_DTYPES = (np.float32, np.float16, np.int8)
"""Of `fd::Scales`, in its order."""
_MULTIPLES = 2
_LORA_PARTS = 3
"""Most parts of `fd::LoraDelta`."""


class Arena:
    """Memory of a pack's weights; freed with the last of them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.handle = checked(library.fd_arena_new(), "weights")

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.fd_arena_free(self.handle)


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A packed linear, or a table: rows of a table are columns of its linear."""

    handle: Any
    width: int
    """Columns of the result; of gate only if gate and up are interleaved."""
    inputs: int
    arena: Arena
    format: str | None = None
    """Format of its first part, if its values stay packed."""
    squeezed: bool = False
    """True if values of bfloat16 take 12 bits, without loss."""


@dataclass(frozen=True, slots=True)
class NativeHeads:
    """A packed matrix of each head."""

    handles: Any
    """Array of the linears' handles."""
    width: int
    inputs: int
    arena: Arena


@dataclass(frozen=True, slots=True)
class NativeLora:
    """One adapter's term of a linear, laid out as `fd::LoraDelta`."""

    down: NativeLinear
    """[sum of ranks, in]"""
    up: NativeLinear
    """[out, rank of a part], in the order of the linear; block-diagonal over all parts if one ends inside a vector."""
    starts: tuple[int, ...]
    """First column of each part in `down`; -1 for an unchanged part."""
    outs: tuple[int, ...]
    """Columns of each part."""


def pack_lora(
    runtime: Runtime, arena: Arena, parts: Sequence[LowRank | None], outs: Sequence[int], *, gated: bool
) -> NativeLora:
    """Copy an adapter's term of a linear, whose parts have `outs` columns, into the kernels' layout."""
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
    if not gated and (len(outs) > _LORA_PARTS or any(end % runtime.lanes for end in np.cumsum(outs)[:-1])):
        whole = np.zeros((sum(outs), rank * len(there)), np.float32)
        for of_part, start, end in zip(ups, places, np.cumsum(outs), strict=True):
            if start >= 0:
                whole[end - len(of_part) : end, start : start + rank] = of_part
        ups, places, outs = [whole], [0], [sum(outs)]
    down, up = (
        pack(runtime, arena, [RawTensor("F32", each) for each in weights], biases=None, gated=of_gate)
        for weights, of_gate in ((downs, False), (ups, gated))
    )
    return NativeLora(down, up, tuple(places), outs=tuple(outs))


def _filled(values: npt.NDArray[np.float32], rows: int, columns: int) -> npt.NDArray[np.float32]:
    return np.pad(values, ((0, rows - values.shape[0]), (0, columns - values.shape[1])))


def pack(
    runtime: Runtime,
    arena: Arena,
    parts: Sequence[Weight],
    biases: Sequence[RawTensor] | None,
    *,
    gated: bool,
    squeeze: bool = False,
) -> NativeLinear:
    """Copy weights [out_i, in] and biases [out_i] into the kernels' layout.

    With `squeeze`, values of bfloat16 are stored in 12 bits if they allow it; see `csrc/linear/squeezed.h`.
    """
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
        # `i` distinguishes gate and up; other parts are consecutive.
        side, column = (i, 0) if gated else (0, column)
        if biases is not None:
            _add_bias(runtime, handle, side, column, biases[i])
        for block in part.blocks():
            if isinstance(block, PackedTensor) and form is not None:
                arrays = _arrays(block, form)
                addresses = (None if each is None else each.ctypes.data for each in arrays)
                library.fd_packed_pack(handle, side, column, *addresses, block.group, len(arrays[0]), runtime.team)
            else:
                whole = block.expanded()
                data = np.ascontiguousarray(whole.data)
                code = _TYPE_CODES[whole.dtype]
                library.fd_linear_pack(handle, side, column, data.ctypes.data, code, len(data), runtime.team)
            column += block.shape[0]
    squeezed = squeeze and form is None and bool(library.fd_linear_squeeze(arena.handle, handle, runtime.team))
    kept = parts[0].format if form is not None and isinstance(parts[0], PackedTensor) else None
    return NativeLinear(handle, width, inputs, arena=arena, format=kept, squeezed=squeezed)


def with_bias(runtime: Runtime, linear: NativeLinear, bias: RawTensor | None) -> NativeLinear:
    """Return a linear without a bias, or the same values with one."""
    if bias is None:
        return linear
    handle = checked(runtime.library.fd_linear_biased(linear.arena.handle, linear.handle), "a bias")
    _add_bias(runtime, handle, 0, 0, bias)
    return replace(linear, handle=handle)


def _add_bias(runtime: Runtime, handle: Any, side: int, column: int, bias: RawTensor) -> None:
    data = np.ascontiguousarray(bias.data)
    runtime.library.fd_linear_bias(handle, side, column, data.ctypes.data, _TYPE_CODES[bias.dtype], data.size)


def _form_of(parts: Sequence[Weight]) -> PackedForm | None:
    """Return the format that holds all parts exactly; None if they must be dequantized."""
    packed = [part for part in parts if isinstance(part, PackedTensor)]
    group = math.gcd(*(part.group for part in packed))
    if len(packed) < len(parts) or (group != parts[0].shape[1] and group % 32 != 0 and group != 16):
        return None
    signed = {part.bits == 8 or not part.has_minima for part in packed}
    minima = any(part.has_minima for part in packed)
    scales = _MULTIPLES if all(part.has_units for part in packed) else int(all(part.half_scales for part in packed))
    if all(part.format == MXFP4 for part in packed):
        return PackedForm(4, group, 12, minima, scales, 1)
    if all(part.bits == 4 for part in packed) and len(signed) == 1:
        return PackedForm(4, group, 8 if signed == {True} else 0, minima, scales)
    if all(part.bits < 6 or (part.bits == 6 and not part.has_minima) for part in packed):  # from -32 to 31
        return PackedForm(6, group, 32, minima, scales)
    return PackedForm(8, group, 128, minima, scales)


def _arrays(part: PackedTensor, form: PackedForm) -> tuple[npt.NDArray[Any], npt.NDArray[Any], Any, Any]:
    """Return values, scales, minima and units as `fd_packed_pack` takes them."""
    scales, minima, units = part.scales, part.minima, None
    if form.scales == _MULTIPLES and part.units is not None:
        each = UNIT_SPAN // part.group
        units = np.ascontiguousarray(part.units, np.float16)
        scales = _multiples(scales, part.units[..., 0], each)
        minima = None if minima is None else _multiples(minima, part.units[..., 1], each)
    dtype = _SCALE_DTYPES[form.scales]
    minima = None if minima is None else np.ascontiguousarray(minima, dtype)
    return np.ascontiguousarray(part.values), np.ascontiguousarray(scales, dtype), minima, units


def _multiples(factors: _Floats, units: _Floats, each: int) -> _Floats:
    """Return the integers by which `factors` are multiples of units, which are those of `each` of them."""
    by = np.repeat(units, each, axis=1)
    return np.rint(np.divide(factors, by, out=np.zeros_like(factors), where=by != 0))


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer of a cache."""

    cache: NativeKVCache
    index: int


class NativeKVCache(KVCache):
    """Keys and values of all layers; see `csrc/kv.h` for the order inside a block."""

    def __init__(self, runtime: Runtime, shape: KVShape, num_blocks: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self._library = runtime.library
        own = np.dtype(np.float32 if runtime.wide else np.uint16)
        self._dtype = np.dtype(np.int8) if shape.quantized else own
        needed = shape.bytes_per_block(own.itemsize) * num_blocks
        sizes = shape.num_layers, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, shape.latent
        made = self._library.fd_kv_new(*sizes, runtime.type_code, shape.quantized)
        self.handle = checked(made, f"a KV cache of {num_blocks} blocks ({needed} bytes)")

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.fd_kv_free(self.handle)

    def layer(self, index: int) -> NativeLayer:
        if not 0 <= index < self.shape.num_layers:
            raise IndexError(f"expected a layer from 0 to {self.shape.num_layers - 1}, got {index}")
        return NativeLayer(self, index)

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks in canonical order; bfloat16 as uint16 bits."""
        data = np.empty(self._canonical_shape(len(blocks)), self._dtype)
        self._transfer(blocks, data, to_cache=False)
        return data

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        if data.dtype != self._dtype or data.shape != self._canonical_shape(len(blocks)):
            raise ValueError(f"expected blocks of {self._dtype}, got {data.dtype} {data.shape}")
        self._transfer(blocks, np.ascontiguousarray(data), to_cache=True)

    def _canonical_shape(self, count: int) -> tuple[int, ...]:
        shape = self.shape
        return (count, *shape.block_sizes)

    def _transfer(self, blocks: IntArray, data: npt.NDArray[Any], *, to_cache: bool) -> None:
        ids = np.ascontiguousarray(blocks, np.int32)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.num_blocks):
            raise ValueError(f"expected blocks from 0 to {self.num_blocks - 1}, got {ids.min()} to {ids.max()}")
        self._library.fd_kv_transfer(self.handle, ids.ctypes.data, len(ids), data.ctypes.data, to_cache)
