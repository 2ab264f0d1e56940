"""Flattened batch of a step. The step token budget is enforced here, on the actual number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fd_core.config import Limits
from fd_core.ops.contract import Array, GroupTables, HostStep, Ops, StepInput
from fd_core.runner.batch import PersistentBatch
from fd_core.types import IntArray, StepPlan

_Value = TypeVar("_Value")
Fed = tuple[Array | None, Array]
"""Indices of a step's tokens that are only on the device, int32[n], and their slots, int32[n].

The indices are None if all tokens are: then there is one slot per token, and num_slots for padding.
"""


def uploaded(value: _Value, ops: Ops) -> _Value:
    """Return a value with its numpy arrays uploaded to the device in one transfer; unchanged for a pack on the host.

    A value is an array, a dataclass or a tuple of values; others are unchanged, such as device arrays and `HostStep`.
    """
    if ops.on_host:
        return value
    arrays: list[npt.NDArray[Any]] = []
    _gather((value,), arrays)
    result: _Value = _replaced((value,), iter(ops.upload(arrays)))[0]
    return result


def _gather(parts: Iterable[Any], arrays: list[npt.NDArray[Any]]) -> None:
    for part in parts:
        if isinstance(part, np.ndarray):
            arrays.append(part)
        elif isinstance(part, tuple):
            _gather(part, arrays)
        elif (parts_of := _parts_of(part.__class__)) is not None:
            _gather(parts_of(part), arrays)


def _replaced(parts: Iterable[Any], found: Iterator[Array]) -> list[Any]:
    """Return the parts, each array replaced by the next one found."""
    replaced = []
    for part in parts:
        if isinstance(part, np.ndarray):
            part = next(found)
        elif isinstance(part, tuple):
            part = tuple(_replaced(part, found))
        elif (parts_of := _parts_of(part.__class__)) is not None:
            part = part.__class__(*_replaced(parts_of(part), found))
        replaced.append(part)
    return replaced


@cache
def _parts_of(kind: type) -> attrgetter[tuple[Any, ...]] | None:
    """Return a getter of all fields of a dataclass, at least two; None for other types and for `HostStep`."""
    return attrgetter(*(each.name for each in fields(kind))) if is_dataclass(kind) and kind is not HostStep else None


class BudgetExceeded(RuntimeError):
    """A plan computes more tokens than the step token budget allows."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Tokens of each slot that a forward computes, and the positions where it yields logits."""

    slots: IntArray
    """int32[n]"""
    starts: IntArray
    """int32[n]"""
    counts: IntArray
    """int32[n], tokens computed, at least 1."""
    logits_rows: IntArray
    """int32[R], indices into the flattened batch."""
    shape: tuple[int, int] | None = field(default=None, kw_only=True)
    """Rows, and tokens per row, of the padded step; None without padding.

    A shorter span is padded in front with earlier tokens of the same request, whose KV is written to the spare block.
    So a span only reads its own request, and no NaN of another one reaches it. Padding rows come last and use only the
    spare block.
    """


@dataclass(frozen=True, slots=True)
class Rows(Spans):
    """The rows of a plan as the runner computes them: with actual positions and drafts.

    flattened:   | row 0: chunk . . . | row 1: last token, draft, draft | row 2: last token |
    logits of:                      ^                  ^      ^      ^               ^

    There are 1 + drafts rows of logits for each sampling row, in order.
    """

    begins: IntArray
    """int32[n], start of each row's tokens, after padding, in the flattened batch."""
    sampling: IntArray
    """int32[N], indices of the rows that sample."""
    sampled_slots: IntArray
    """int32[N]"""
    drafts: IntArray
    """int32[N], number of drafts that each of them verifies."""
    drafted: bool
    logits_slots: IntArray
    """int32[R]"""
    positions: IntArray
    """int32[R], position of the token sampled from each row of logits."""
    columns: IntArray
    """int32[R], column of the token matrix."""

    def cells(self, width: int) -> IntArray:
        """Return int32[N, width], the row of logits of each cell of the sampling rows; the last one repeats."""
        if not self.drafted:
            return np.repeat(np.arange(len(self.drafts), dtype=np.int32), width).reshape(-1, width)
        firsts = np.cumsum(self.drafts + 1) - (self.drafts + 1)
        return (firsts[:, None] + np.minimum(np.arange(width), self.drafts[:, None])).astype(np.int32)


def resolve_rows(
    plan: StepPlan,
    batch: PersistentBatch,
    limits: Limits,
    padded: Callable[[int, int], tuple[int, int] | None] | None = None,
) -> Rows:
    """Resolve the rows of a plan: the number of drafts and the start of each row.

    A row that samples ends with the last known token, which may be before the planned position if drafts of an earlier
    step were rejected. A step is padded to the shape that `padded` returns, see `Ops.padded`, which counts towards the
    budget; it is not padded if a request has fewer tokens than a row of that shape. Raises `BudgetExceeded` if the step
    is larger than the budget, and `RuntimeError` if it exceeds the tokens in the batch.
    """
    slots, length = plan.slots, batch.length[plan.slots]
    drafts, own = plan.num_drafts, plan.num_tokens
    if np.count_nonzero(drafts):
        own = own - drafts
        drafts = np.minimum(drafts, batch.num_drafts[slots])
    counts = own + drafts
    starts = np.where(plan.samples, length - own, plan.starts)
    shape = padded(len(counts), int(counts.max())) if padded is not None and len(counts) else None
    if shape is not None and (starts + counts < shape[1]).any():
        shape = None
    total = int(counts.sum()) if shape is None else shape[0] * shape[1]
    if total > limits.max_num_batched_tokens:
        raise BudgetExceeded(
            f"step {plan.step} computes {total} tokens, over the budget {limits.max_num_batched_tokens}"
        )
    astray = (starts > plan.starts) | (starts + own > length) | (starts < 0)
    if astray.any():
        slot = int(slots[astray][0])
        raise RuntimeError(f"step {plan.step} plans tokens of slot {slot} beyond those in the runner's batch")
    sampling = plan.samples.nonzero()[0].astype(np.int32)
    if shape is None:
        begins = np.cumsum(counts, dtype=np.int32) - counts
    else:  # padding precedes the tokens of a row
        begins = np.arange(1, len(counts) + 1, dtype=np.int32) * np.int32(shape[1]) - counts
    logits_rows = (begins + own - 1)[sampling]
    logits_slots = sampled_slots = slots[sampling]
    positions, verified = length[sampling], drafts[sampling]
    drafted = bool(verified.any())
    if drafted:
        row_of = np.repeat(np.arange(len(verified), dtype=np.int32), verified + 1)
        firsts = np.cumsum(verified + 1, dtype=np.int32) - (verified + 1)
        columns = np.arange(len(row_of), dtype=np.int32) - firsts[row_of]
        logits_rows, logits_slots = logits_rows[row_of] + columns, sampled_slots[row_of]
        positions = positions[row_of] + columns
    else:
        columns = np.zeros(len(sampling), np.int32)
    return Rows(
        slots=slots,
        starts=starts,
        counts=counts,
        begins=begins,
        sampling=sampling,
        sampled_slots=sampled_slots,
        drafts=verified,
        drafted=drafted,
        logits_rows=logits_rows,
        logits_slots=logits_slots,
        positions=positions,
        columns=columns,
        shape=shape,
    )


def build_inputs(spans: Spans, tokens: IntArray, tables: IntArray, size: int, ops: Ops) -> StepInput:
    """Build and upload the input of a forward pass outside the steps; see `gather_inputs`."""
    return uploaded(gather_inputs(spans, tokens, tables, size=size), ops)


def gather_inputs(
    spans: Spans,
    tokens: IntArray,
    tables: IntArray,
    size: int,
    spare_block: int | None = None,
    adapters: IntArray | None = None,
) -> StepInput:
    """Gather, on the host, tokens, positions, cache slots and block tables of the spans, at least one.

    `tokens` int32[num_slots, *] and `tables` int32[groups, num_slots, blocks] are the state of every slot; `size` is
    the number of tokens in a block; `spare_block` is the block that padding writes. `adapters` int32[num_slots] is the
    adapter slot of each slot; None if none of them has one.
    """
    slots, starts, counts = spans.slots, spans.starts, spans.counts
    context = starts + counts
    width, max_context, padding = int(counts.max()), int(context.max()), 0
    spare = 0 if spare_block is None else spare_block
    if spans.shape is not None:
        if spare_block is None:
            raise RuntimeError("the pack pads steps, but its KV cache has no spare block")
        padding, width = spans.shape[0] - len(slots), spans.shape[1]
        starts, counts = context - width, np.full_like(counts, width)
    if width == 1:
        query_start = np.arange(len(slots) + 1, dtype=np.int32)
        positions, slot_of = starts, slots
    else:
        query_start = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        row_of = np.repeat(np.arange(len(slots), dtype=np.int32), counts)
        positions = np.arange(len(row_of), dtype=np.int32) - query_start[row_of] + starts[row_of]
        slot_of = slots[row_of]
    entries, offsets = np.divmod(positions, size)
    kv_slots = tables[:, slot_of, entries] * size + offsets
    if spans.shape is not None and width > 1:
        kv_slots[:, positions < np.repeat(spans.starts, width)] = spare * size  # computed before
    token_ids = tokens[slot_of, positions]
    block_tables = tables[:, slots, : -(-max_context // size)]
    lora_slots = None if adapters is None else adapters[slot_of]
    if padding:
        filling = padding * width
        query_start = _padded(query_start, padding, query_start[-1] + width * np.arange(1, padding + 1, dtype=np.int32))
        context = _padded(context, padding, width)
        block_tables = _padded(block_tables.swapaxes(0, 1), padding, spare).swapaxes(0, 1)
        token_ids, kv_slots = _padded(token_ids, filling, 0), _padded(kv_slots.T, filling, spare * size).T
        positions = _padded(positions, filling, np.arange(filling, dtype=np.int32) % width)
        lora_slots = None if lora_slots is None else _padded(lora_slots, filling, 0)
    return StepInput(
        token_ids=token_ids,
        positions=positions,
        kv_slots=kv_slots[0],
        query_start=query_start,
        context_len=context,
        block_tables=block_tables[0],
        logits_rows=spans.logits_rows,
        max_query=width,
        max_context=max_context,
        uniform=width == 1 or spans.shape is not None,
        host=HostStep(query_start, context, block_tables[0] if len(tables) == 1 else block_tables),
        grouped=None if len(tables) == 1 else GroupTables(*map(np.ascontiguousarray, (kv_slots, block_tables))),
        **({} if lora_slots is None else _adapter_fields(lora_slots)),
    )


def following_tokens(spans: Spans, tokens: IntArray) -> IntArray:
    """Return int32[T], the token after each of the spans, which are not padded; see `gather_inputs`."""
    counts = spans.counts
    offsets = np.arange(int(counts.sum()), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.repeat(spans.starts, counts) + offsets + 1
    following: IntArray = tokens[np.repeat(spans.slots, counts), np.minimum(positions, tokens.shape[1] - 1)]
    return following


def adapter_rows(places: IntArray, ops: Ops) -> dict[str, Any]:
    """Return the fields of `StepInput` for the adapter slot of each token, int32[T]."""
    return {name: uploaded(value, ops) for name, value in _adapter_fields(places).items()}


def _adapter_fields(places: IntArray) -> dict[str, Any]:
    hit = np.unique(places[places > 0]).tolist()
    return {
        "lora_slots": places,
        "lora_groups": tuple((place, (places == place).nonzero()[0].astype(np.int32)) for place in hit),
    }


def _padded(array: IntArray, more: int, value: IntArray | int) -> IntArray:
    """Return the array with `more` rows of `value`, or of its elements, appended."""
    filling = np.empty((more, *array.shape[1:]), array.dtype)
    filling[...] = value
    return np.concatenate([array, filling])


class LastTokens:
    """Last tokens on the device, int32[num_slots + 1, 1]; the last row is 0, for padding.

    Used by packs that queue; other packs return with all tokens on the host.
    """

    def __init__(self, ops: Ops, num_slots: int) -> None:
        self._ops = ops
        self._num_slots = num_slots
        self._tokens = ops.from_host(np.zeros((num_slots + 1, 1), np.int32))

    def gather(self, rows: Rows, unsettled: IntArray, total: int) -> Fed | None:
        """Return the tokens that a step of `total` tokens, including padding, reads from here; None for none.

        `unsettled` int32[num_slots] counts the tokens of each slot that are only on the device.
        """
        fed = unsettled[rows.slots].nonzero()[0]
        if not len(fed):
            return None
        if len(fed) == len(rows.slots) and not rows.drafted and (rows.shape is None or rows.shape[1] == 1):
            slots = np.full(total, self._num_slots, np.int32)  # one token in each row
            slots[: len(fed)] = rows.slots
            return None, slots
        lasts = rows.begins + rows.counts - 1
        lasts[rows.sampling] -= rows.drafts
        return lasts[fed], rows.slots[fed]

    def feed(self, token_ids: Array, fed: Fed) -> Array:
        """Write last tokens, as `gather` returned, into the tokens int32[T] of a step."""
        places, slots = fed
        tokens = self._ops.gather_rows(self._tokens, slots)
        if places is not None:
            tokens = self._ops.write_rows(token_ids.reshape(-1, 1), places, tokens)
        return tokens.reshape(-1)

    def keep(self, slots: Array, grid: Array) -> None:
        """Store the tokens of a step: slots int32[N], sampled int32[N, 1 + k]; only used for rows without drafts."""
        self._tokens = self._ops.write_rows(self._tokens, slots, grid[:, :1])
