"""Weights as read from a checkpoint, independent of any framework."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

FP8: Final = "F8_E4M3"
"""8-bit floating-point format: sign, 4 bits of exponent, 3 bits of mantissa."""

MXFP4: Final = "MXFP4"
"""4-bit floating-point format (e2m1) with a power of two as the scale of 32 values."""
FP4_HALVES: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the value of each code of that format."""

WEIGHT_FORMATS: Final = frozenset(
    {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "int8", "int4", "gptq", "awq", FP8, MXFP4}
)
"""Every `PackedTensor.format`: those of GGUF by ggml's names, and those of safetensors or `--quantization`."""
UNIT_SPAN: Final = 256
"""Values of a row that share a unit of `PackedTensor.units`."""


ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element of each `Ops.dtype`."""

RAW_TYPES: Final[Mapping[str, str]] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Every `RawTensor.dtype`, and numpy's code of its elements."""

_BLOCK: Final = 1 << 20
"""Elements of a block of rows."""


def row_blocks(shape: tuple[int, ...], stored: npt.NDArray[Any]) -> Iterator[slice]:
    """Yield slices of the outermost axis of a tensor; each releases the pages of a mapped file that held it.

    So a tensor's conversion needs memory for its result and for one block, in bytes of the file and converted.
    """
    rows = max(1, _BLOCK // max(1, math.prod(shape[1:])))
    for begin in range(0, shape[0], rows):
        block = slice(begin, begin + rows)
        yield block
        release_pages(stored[block])


def release_pages(array: npt.NDArray[Any]) -> None:
    """Unload the pages of a mapped file that a contiguous array views; the next access reads them again."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    # Pages of memory that is not a file's, or is written to, would lose their content.
    is_mapped = isinstance(owner, mmap.mmap) and not array.flags.writeable and hasattr(mmap, "MADV_DONTNEED")
    if is_mapped and array.flags.c_contiguous and array.nbytes:
        start = array.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        owner.madvise(mmap.MADV_DONTNEED, first, start + array.nbytes - first)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A weight as read from a checkpoint, independent of any framework."""

    dtype: str
    """One of `RAW_TYPES`."""
    data: npt.NDArray[Any]
    """float32, float16, or uint16 holding bfloat16 bits; may be a read-only memory map."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.data.shape)

    def to_float32(self) -> npt.NDArray[np.float32]:
        """Return the values as float32."""
        if self.dtype == "BF16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data.astype(np.float32, copy=False)

    def expanded(self) -> RawTensor:
        """Return the tensor itself, as it is not packed."""
        return self

    def take_rows(self, order: npt.NDArray[np.integer[Any]] | slice) -> RawTensor:
        """Return some rows (outermost entries), in the given order."""
        return RawTensor(self.dtype, self.data[order])

    def blocks(self) -> Iterator[RawTensor]:
        """Yield the rows in blocks; see `row_blocks`."""
        return map(self.take_rows, row_blocks(self.shape, self.data))

    def take_columns(self, columns: slice) -> RawTensor:
        """Return some elements of each row."""
        return RawTensor(self.dtype, self.data[:, columns])

    def order_columns(self, order: npt.NDArray[np.integer[Any]], width: int) -> RawTensor:
        """Return blocks of `width` elements of each row in the given order."""
        return RawTensor(self.dtype, self.data[:, (order[:, np.newaxis] * width + np.arange(width)).ravel()])


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A quantized weight [out, in]: value * scale + minimum, where `group` values of a row share a scale.

    Every format is converted to this one, or to its `FP8` variant: the reader of a file unpacks the bits, and a pack
    repacks them in the layout of its kernels.
    """

    format: str
    """Name for display and for `Ops.weight_formats`, such as `Q4_K` or `int8`."""
    bits: int
    """Bits of a value: 4, 5, 6 or 8; 8 for `MXFP4`, of which a pack that knows its 15 values may store 4."""
    values: npt.NDArray[np.int8]
    """int8[out, in]: from 0 to 2^bits - 1 with minima and less than 8 bits, else from -2^(bits - 1) to 2^(bits - 1) -
    1. For `FP8`, the bits of the values, none of them NaN; for `MXFP4`, some of `FP4_HALVES`."""
    scales: npt.NDArray[np.float32]
    """float32[out, in / group], finite, of either sign."""
    minima: npt.NDArray[np.float32] | None = None
    """float32[out, in / group], of either sign; None if all are 0."""
    units: npt.NDArray[np.float32] | None = None
    """float32[out, in / `UNIT_SPAN`, 1], or [..., 2] with minima, exact in float16: scales, and minima, are these times
    integers from -128 to 127. None if there are no such numbers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.values.shape)

    @property
    def group(self) -> int:
        """Values of a row that share a scale."""
        return int(self.values.shape[1] // self.scales.shape[1])

    @property
    def has_minima(self) -> bool:
        """True if some minima are not 0."""
        return self.minima is not None

    @property
    def has_units(self) -> bool:
        """True if scales and minima are multiples of `units`."""
        return self.units is not None

    @property
    def half_scales(self) -> bool:
        """True if float16 holds scales and minima exactly."""
        with np.errstate(over="ignore"):
            return all(
                bool((each.astype(np.float16) == each).all()) for each in (self.scales, self.minima) if each is not None
            )

    @property
    def stored_bits(self) -> int:
        """Fewest bits in which packs store a value: 4, 6 or 8."""
        return 4 if self.format == MXFP4 else self.bits + self.bits % 2

    @property
    def nbytes(self) -> int:
        """Bytes with values in `stored_bits` each, and scales and minima in float16, or float32 if needed; if they are
        multiples of units, these in float16 and the multiples in 8 bits."""
        values = math.prod(self.shape)
        each = 2 if self.has_minima else 1
        factors, units = values // self.group * each, values // UNIT_SPAN * each if self.has_units else 0
        return values * self.stored_bits // 8 + factors * (1 if units else 2 if self.half_scales else 4) + 2 * units

    def to_float32(self) -> npt.NDArray[np.float32]:
        """Dequantize to float32: a product and a sum, each rounded once."""
        out, groups = self.scales.shape
        values = FP8_VALUES[self.values.view(np.uint8)] if self.format == FP8 else self.values
        grouped = values.reshape(out, groups, -1) * self.scales[:, :, np.newaxis]
        if self.minima is not None:
            grouped += self.minima[:, :, np.newaxis]
        return grouped.reshape(self.shape)

    def expanded(self) -> RawTensor:
        """Dequantize the weight."""
        return RawTensor("F32", self.to_float32())

    def take_rows(self, order: npt.NDArray[np.integer[Any]] | slice) -> PackedTensor:
        """Return some rows, in the given order."""
        minima = None if self.minima is None else self.minima[order]
        units = None if self.units is None else self.units[order]
        return PackedTensor(
            self.format, self.bits, self.values[order], scales=self.scales[order], minima=minima, units=units
        )

    def blocks(self) -> Iterator[PackedTensor]:
        """Yield the rows in blocks; see `row_blocks`."""
        return map(self.take_rows, row_blocks(self.shape, self.values))

    def take_columns(self, columns: slice) -> PackedTensor:
        """Return some values of each row with the same meaning, in smaller groups and without units if necessary."""
        start, stop, _ = columns.indices(self.values.shape[1])
        group = math.gcd(self.group, start, stop - start) if self.scales.shape[1] > 1 else stop - start
        places = np.arange(start, stop, group) // self.group
        minima = None if self.minima is None else self.minima[:, places]
        whole = self.units is not None and start % UNIT_SPAN == stop % UNIT_SPAN == 0
        units = self.units[:, start // UNIT_SPAN : stop // UNIT_SPAN] if self.units is not None and whole else None
        return PackedTensor(self.format, self.bits, self.values[:, start:stop], self.scales[:, places], minima, units)

    def order_columns(self, order: npt.NDArray[np.integer[Any]], width: int) -> PackedTensor:
        """Return blocks of `width` values of each row in the given order, as `take_columns`."""
        parts = [self.take_columns(slice(index * width, (index + 1) * width)) for index in order]

        def joined(name: str) -> Any:
            each = [getattr(part, name) for part in parts]
            return None if each[0] is None else np.concatenate(each, axis=1)

        if self.scales.shape[1] == 1:
            return PackedTensor(self.format, self.bits, joined("values"), self.scales, self.minima)
        return PackedTensor(self.format, self.bits, *map(joined, ("values", "scales", "minima", "units")))


def mxfp4_scales(exponents: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the scales of `FP4_HALVES` for exponents as stored (e8m0)."""
    scales: npt.NDArray[np.float32] = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
    return scales


def _fp8_values() -> npt.NDArray[np.float32]:
    """Convert bytes to numbers: exponents begin at -6, and the format has no infinities and two NaN."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    whole = np.where(exponent == 0, 2 * mantissa, 8 + mantissa)
    size = np.ldexp(whole, exponent - 10)
    size[(codes & 127) == 127] = np.nan
    signed: npt.NDArray[np.float32] = np.where(codes < 128, size, -size).astype(np.float32)
    return signed


FP8_VALUES: Final = _fp8_values()
"""float32[256]: the numbers of FP8 by their bits."""

Weight = RawTensor | PackedTensor
"""A weight of a linear layer as read from a checkpoint."""


class WeightUse(msgspec.Struct, frozen=True):
    """Statistics of weights with the same stored and computed format, for display."""

    stored: str
    """Stored type, such as `BF16` or `Q4_K`."""
    computed: str
    """A format of packed weights, or a dtype."""
    table: bool
    """True for tables whose rows are looked up instead of multiplied."""
    parameters: int
    nbytes: int
    """Approximate bytes in memory: a pack may pad, or store scales in another type."""


def summed_uses(parts: Iterable[Iterable[WeightUse]]) -> tuple[WeightUse, ...]:
    """Return the weight usage over all parts of a model, most parameters first."""
    parameters: Counter[tuple[str, str, bool]] = Counter()
    nbytes: Counter[tuple[str, str, bool]] = Counter()
    for use in chain.from_iterable(parts):
        key = (use.stored, use.computed, use.table)
        parameters[key] += use.parameters
        nbytes[key] += use.nbytes
    return tuple(WeightUse(*key, count, nbytes[key]) for key, count in parameters.most_common())


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's term of one linear: up @ down."""

    down: npt.NDArray[np.float32]
    """[rank, in]"""
    up: npt.NDArray[np.float32]
    """[out, rank], scaled by alpha / rank."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that matches a model."""

    digest: str
    """Hex SHA-256 of its config and its weights, which identifies the adapter."""
    rank: int
    deltas: Mapping[str, LowRank]
    """Terms by name of the linear, such as `model.layers.0.self_attn.q_proj`."""
