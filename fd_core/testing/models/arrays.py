"""Arrays for packs: random values that every dtype represents, metadata of steps, and tolerances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import KV_TYPES, Array, Heads, Ops, PenaltyInput, Rope, SampleInput, StepInput
from fd_core.ops.numpy.kv_8bit import dequantize_kv
from fd_core.ops.weights import FP4_HALVES, FP8, MXFP4, UNIT_SPAN, WEIGHT_FORMATS, PackedTensor, RawTensor
from fd_core.types import IntArray

Floats = npt.NDArray[np.float32]

TOLERANCE: Final[Mapping[str, float]] = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}
"""Maximum error of one operation by dtype, relative to its largest result; the mean may be an eighth of it.

float32 sums in another order than the oracle; float16 has 11 bits of precision and bfloat16 8,
of inputs, weights and results.
"""

_FOR_A_MEAN: Final = 64
"""Different results of which the average error is that of the dtype."""
_LOOKED_AT: Final = 4096
"""Results among which different ones are counted."""


_SERIES: Final = ContextVar("series", default=0)


@contextmanager
def other_values(series: int = 1) -> Iterator[None]:
    """Replace all random values of a check by others of the same shapes, in each series."""
    token = _SERIES.set(series)
    try:
        yield
    finally:
        _SERIES.reset(token)


def generator(*seed: int) -> np.random.Generator:
    """Return a generator of the random values of a check."""
    return np.random.default_rng([*seed, *(each for each in (_SERIES.get(),) if each)])


class Values:
    """Random numbers, the same for two packs that draw in the same order."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = generator(seed)

    def seed(self) -> int:
        """Return a seed of other random values."""
        return int(self._rng.integers(2**31))

    def __call__(self, *shape: int, scale: float = 1.0) -> Floats:
        """Return float32 numbers that are exact in bfloat16 and float16: packs of all dtypes have the same inputs."""
        values = self._rng.standard_normal(shape, np.float32) * np.float32(scale)
        rounded: Floats = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        rounded[np.abs(rounded) < 2.0**-17] = 0.0  # float16 has fewer than 8 bits there
        return rounded


PACKED_TOLERANCE: Final = dict.fromkeys(WEIGHT_FORMATS, 4e-2) | {FP8: 8e-2}
"""Maximum error of products with packed weights, by format.

A pack may quantize the activations to 8 bits, or to `FP8`, with 4 bits of precision, for such weights.
"""


def assert_near(
    ops: Ops, found: Array, expected: npt.NDArray[Any], tolerance: float | None = None, at_least: float = 1e-3
) -> None:
    """Compare a pack's result with the expected one, by default within the tolerance of its dtype.

    `at_least` is a usual size of results, which a few may happen to be below.
    """
    tolerance = tolerance or TOLERANCE[ops.dtype]
    values = np.asarray(ops.to_host(found), np.float64).reshape(expected.shape)
    scale = max(float(np.abs(expected).max()), at_least)
    error = np.abs(values - expected)
    error[~np.isfinite(values)] = np.inf
    index = np.unravel_index(int(error.argmax()), error.shape)
    at = f"at {tuple(map(int, index))} of {error.shape}: expected {expected[index]:.6g}, got {values[index]:.6g}"
    limit = f"where the largest value is {scale:.3g} and {tolerance:.2g} of it is allowed"
    assert error.max() < tolerance * scale, f"{at}: off by {error.max():.3g} {limit}"
    several = np.unique(expected.reshape(-1)[:_LOOKED_AT]).size >= _FOR_A_MEAN
    mean_limit = tolerance / 8 if several else tolerance
    assert error.mean() < mean_limit * scale, f"off by {error.mean():.3g} on average {limit}, most {at}"


class Inputs:
    """Arrays that an operation may read, but not modify."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._held: list[tuple[str, Array, npt.NDArray[Any]]] = []

    def __call__(self, name: str, array: npt.NDArray[Any]) -> Array:
        """Return a device array with the values of `array`."""
        device = self._ops.from_host(array.copy())
        self._held.append((name, device, array.view(np.int64) if array.dtype == np.uint64 else array))
        return device

    def of(self, value: Any, *but: str) -> Any:
        """Return a SampleInput or PenaltyInput of numpy arrays with its arrays, but those named, on the device."""
        names = [each.name for each in fields(value) if each.name not in but]
        arrays = {name: getattr(value, name) for name in names if isinstance(getattr(value, name), np.ndarray)}
        return replace(value, **{name: self(name, array) for name, array in arrays.items()})

    def check_unchanged(self) -> None:
        """Raise `AssertionError` if an array was modified."""
        for name, device, array in self._held:
            found = np.asarray(self._ops.to_host(device))
            assert_same(found.view(np.int64) if found.dtype == np.uint64 else found, array, f"{name} was modified")


@contextmanager
def named(what: str) -> Iterator[None]:
    """Name what is compared in the message of an `AssertionError`."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


def assert_same(found: Any, expected: Any, what: str = "result") -> None:
    """Compare arrays, or sequences of numbers, element by element. Raises `AssertionError` with the first difference.

    NaN equals NaN.
    """
    ours, right = np.asarray(found), np.asarray(expected)
    assert ours.shape == right.shape, f"{what}: expected the shape {right.shape}, got {ours.shape}"
    differ = ours != right
    if right.dtype.kind == "f" and ours.dtype.kind == "f":
        differ &= ~(np.isnan(ours) & np.isnan(right))
    if differ.any():
        first = tuple(np.argwhere(differ)[0].tolist())
        at = first[0] if len(first) == 1 else first
        count = f"; {differ.sum():,} of {differ.size:,} differ" if differ.size > 1 else ""
        raise AssertionError(f"{what} at {at} of {ours.shape}: expected {right[first]}, got {ours[first]}{count}")


def assert_within(found: Any, expected: Any, atol: float, what: str = "result") -> None:
    """Compare arrays whose elements may differ by `atol`. Raises `AssertionError` with the largest difference."""
    ours, right = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert ours.shape == right.shape, f"{what}: expected the shape {right.shape}, got {ours.shape}"
    with np.errstate(invalid="ignore"):  # infinities that are equal
        error = np.where(ours == right, 0.0, np.abs(ours - right))
    error[~np.isfinite(error)] = np.inf
    if error.size and error.max() > atol:
        at = np.unravel_index(int(error.argmax()), error.shape)
        where = f"{what} at {tuple(map(int, at))} of {ours.shape}"
        raise AssertionError(
            f"{where}: expected {right[at]:.6g}, got {ours[at]:.6g}: off by {error[at]:.3g}, allowed {atol:.3g}"
        )


def raw(values: npt.NDArray[Any]) -> RawTensor:
    """Return a weight as read from a checkpoint, float32."""
    return RawTensor("F32", values.astype(np.float32))


def float32_of(held: npt.NDArray[Any]) -> Floats:
    """Convert exported KV of any pack to float32; uint16 holds the bits of bfloat16."""
    if held.dtype in KV_TYPES.values():
        return dequantize_kv(held)
    if held.dtype == np.uint16:
        return (held.astype(np.uint32) << 16).view(np.float32)
    return held.astype(np.float32, copy=False)


KV_STEP: Final[Mapping[str, float]] = {"auto": 0.0, "int8": 1e-2, "fp8": 0.0}
"""By how much a sum in another order moves a key or value between two of its 255 steps, relative to the largest one.

Steps of FP8 depend on the number: see `but_for_a_step`.
"""


def but_for_a_step(found: Floats, expected: Floats, dtype: str) -> Floats:
    """Return keys or values of a cache of FP8 moved by one step of theirs towards the expected ones; others as found.

    Raises `AssertionError` if more differ than those that a sum in another order moves between two steps.
    """
    if dtype != "fp8":
        return found
    differ = found != expected
    assert differ.sum() < 16 + 0.25 * differ.size, f"{differ.sum()} of {differ.size} elements of FP8 differ"
    step = np.maximum(np.maximum(np.abs(found), np.abs(expected)) / 8, 1 / 512)
    moved: Floats = expected + np.sign(found - expected) * np.maximum(np.abs(found - expected) - step, 0)
    return moved


_PACKED: Final = {
    # bits, group (0: a row), minima
    "Q8_0": (8, 32, False),
    "Q4_0": (4, 32, False),
    "Q4_1": (4, 32, True),
    "Q5_0": (5, 32, False),
    "Q5_1": (5, 32, True),
    "Q4_K": (4, 32, True),
    "Q5_K": (5, 32, True),
    "Q6_K": (6, 16, False),
    "int8": (8, 0, False),
    "int4": (4, 32, False),
    "gptq": (4, 64, True),
    "awq": (4, 64, True),
    FP8: (8, 128, False),
    MXFP4: (8, 32, False),
}


STORED: Final = ("usual", "other minima", "8 bits", "8 bits and other minima", "by columns", "sliced")
"""Forms of packed weights: with minima if usually without, or vice versa; with more bits; as arrays whose columns are
contiguous, which transposed files yield, or that are columns of wider ones, as shards are. Formats of GGUF have only
their usual minima and bits."""
GROUPED: Final = ("int8", "int4", "gptq", "awq", FP8)
"""Formats whose files have groups of several sizes, and minima or not, except FP8."""


def packed_weight(
    kind: str, out: int, inputs: int, group: int | None = None, scale: float = 1.0, stored: str = "usual", seed: int = 0
) -> PackedTensor:
    """Return a random weight [out, inputs] of one of `ops.weights.WEIGHT_FORMATS`, with its usual group size."""
    bits, usual, minima = _PACKED[kind]
    group = group or usual or inputs
    if kind in GROUPED and kind != FP8:
        minima ^= "other minima" in stored
        bits = 8 if "8 bits" in stored and kind == "gptq" else bits
    rng = generator(out, inputs, bits, seed)
    low = 0 if minima and bits < 8 else -(2 ** (bits - 1))
    values = rng.integers(low, low + 2**bits, (out, inputs)).astype(np.int8)
    if kind == MXFP4:
        values = FP4_HALVES[values & 15]
    if kind == FP8:
        values = np.where((values & 127) == 127, np.int8(0), values)  # no NaN
    # In half precision, as in files.
    scales = (scale * rng.uniform(0.5, 1.5, (out, inputs // group)) / 2 ** (bits - 1)).astype(np.float16)
    scales *= rng.choice([-1, 1], scales.shape).astype(np.float16)
    scales[1::16] = 0  # rows of zeros, or of their minima
    if kind == MXFP4:
        scales = np.ldexp(np.float16(scale / 8), rng.integers(-1, 2, scales.shape)).astype(np.float16)
    numbers = scales.astype(np.float32)
    lowest = (scale * rng.uniform(-1.5, 1.5, scales.shape)).astype(np.float16).astype(np.float32) if minima else None
    units = None
    if kind.endswith("_K") and inputs % UNIT_SPAN == 0:
        most = 126 if bits == 6 else 62  # the largest unit may be rounded down
        spans = inputs // UNIT_SPAN
        numbers, unit = _multiples(numbers, spans, most, rng)
        if lowest is None:
            units = unit[..., np.newaxis]
        else:
            lowest, other = _multiples(lowest, spans, most, rng)
            units = np.stack([unit, other], axis=-1)
    lowest = None if lowest is None else placed(lowest, stored)
    numbers = placed(numbers, stored)
    return PackedTensor(kind, bits, placed(values, stored), scales=numbers, minima=lowest, units=units)


def _multiples(
    factors: npt.NDArray[np.float32], spans: int, most: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Round scales or minima to multiples of units, which `spans` parts of a row have; return both."""
    rows, groups = factors.shape
    units = (np.abs(factors).max() / most * rng.uniform(1, 2, (rows, spans))).astype(np.float16).astype(np.float32)
    by = np.repeat(units, groups // spans, axis=1)
    return np.rint(factors / by) * by, units


def placed(array: npt.NDArray[Any], stored: str) -> npt.NDArray[Any]:
    """Return an array in memory as one of `STORED` specifies."""
    if stored == "sliced":
        return np.hstack([array[:, ::-1], array, array[:, ::-1]])[:, array.shape[1] : 2 * array.shape[1]]
    return np.asfortranarray(array) if stored == "by columns" else array


def stored_weight(values: Floats, source: str, stored: str = "usual") -> RawTensor:
    """Return a weight as read from a checkpoint of a dtype."""
    array: Any = values.copy()
    if source == "F16":
        array = values.astype(np.float16)
    elif source == "BF16":
        array = (values.view(np.uint32) >> 16).astype(np.uint16)
    array = placed(array, stored)
    array.flags.writeable = False  # as from a mapped file
    return RawTensor(source, array)


def out_of_order(count: int) -> IntArray:
    """Return adjacent blocks in another order between the first and the last one, by which they look ascending."""
    return np.array([0, *range(count - 2, 0, -1), count - 1][:count], np.int32)


def activations(ops: Ops, values: Floats) -> Array:
    """Return [T, H] values as activations in the pack's dtype; a new array each time."""
    rows = ops.from_host(np.arange(len(values), dtype=np.int32))
    return ops.embedding(ops.prepare_embedding(raw(values)), rows)


def heads_on(ops: Ops, x: Floats, y: Floats | None = None) -> tuple[Array, Array, Array]:
    """Return [T, heads, d] values as activations of the pack, as q and k, and `y`, or x again, as v."""
    tokens, heads, d = x.shape
    flat = activations(ops, np.concatenate([x, x, x if y is None else y], axis=1).reshape(tokens, -1))
    return ops.split_heads(flat, Heads(heads, heads, d, scale=1.0, rope=no_rope(ops)))


def no_rope(ops: Ops) -> Rope:
    """Return tables for operations that do not rotate, but take the geometry of heads."""
    table = ops.prepare_vector(np.ones((1, 1), np.float32))
    return Rope(table, table)


def on_device(ops: Ops, value: Any) -> Any:
    """Return a StepInput, SampleInput or PenaltyInput of numpy arrays with its arrays on the pack's device."""
    arrays = {
        each.name: ops.from_host(getattr(value, each.name))
        for each in fields(value)
        if isinstance(getattr(value, each.name), np.ndarray)
    }
    return replace(value, **arrays)


def sample_input(rows: int, **columns: Any) -> SampleInput:
    """Return parameters of `rows` rows; a column is one value for all rows, or a value per row."""
    defaults: dict[str, tuple[float, type[np.generic]]] = {
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "seeds": (0, np.uint64),
        "positions": (0, np.int32),
    }
    arrays = {
        name: np.broadcast_to(np.asarray(columns.get(name, default), dtype), (rows,)).copy()
        for name, (default, dtype) in defaults.items()
    }
    filters = (arrays["top_k"] > 0) | (arrays["top_p"] < 1) | (arrays["min_p"] > 0)
    return SampleInput(**arrays, all_greedy=bool((arrays["temperature"] == 0).all()), any_filter=bool(filters.any()))


def penalty_input(
    counts: IntArray,
    *,
    rows: npt.ArrayLike | None = None,
    counts_rows: npt.ArrayLike | None = None,
    drafts: Sequence[tuple[int, int]] = (),
    **columns: npt.ArrayLike,
) -> PenaltyInput:
    """Return penalties of `rows`, by default one per row of `counts`; `drafts` are pairs of (row, token)."""
    chosen = np.arange(len(counts), dtype=np.int32) if rows is None else np.asarray(rows, np.int32)
    neutral = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    arrays = {
        name: np.broadcast_to(np.asarray(columns.get(name, default), np.float32), chosen.shape).copy()
        for name, default in neutral.items()
    }
    return PenaltyInput(
        rows=chosen,
        counts=counts,
        counts_rows=chosen if counts_rows is None else np.asarray(counts_rows, np.int32),
        draft_rows=np.array([row for row, _ in drafts], np.int32),
        draft_ids=np.array([token for _, token in drafts], np.int32),
        **arrays,
    )


TURNED: Final = ("by place", "before", "own row")


def turned(step: StepInput, kind: object, table: int) -> StepInput:
    """Return a step, on the host, with positions of a kind of `TURNED`: of texts, after an image, and of an image.

    Tokens of an image have rows of their own, after the first ones of a `table`.
    """
    places, own = step.positions, np.arange(len(step.positions), dtype=np.int32)
    kinds = {"before": places // 2, "own row": np.where(own % 3, table + own[::-1], places)}
    return replace(step, positions=kinds.get(str(kind), places))


def step_input(rows: Sequence[tuple[int, int]], block_size: int, tables: IntArray) -> StepInput:
    """Return the metadata of (tokens, context) rows over the given block tables."""
    counts, contexts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    query_start = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    row_of = np.repeat(np.arange(len(rows)), counts)
    positions = np.concatenate([np.arange(context - count, context) for count, context in rows]).astype(np.int32)
    slots = tables[row_of, positions // block_size] * block_size + positions % block_size
    return StepInput(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        kv_slots=slots.astype(np.int32),
        query_start=query_start,
        context_len=contexts,
        block_tables=tables,
        logits_rows=query_start[1:] - 1,
        max_query=int(counts.max()),
        max_context=int(contexts.max()),
    )
