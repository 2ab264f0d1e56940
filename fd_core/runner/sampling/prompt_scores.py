"""Prompt results from the hidden states of each chunk: log-probabilities and embeddings.

For log-probabilities, the output projection runs on a bounded number of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import Array, Ops
from fd_core.runner.inputs.inputs import Rows
from fd_core.types import Admission, IntArray, PooledRows, Pooling, PromptLogprobRows

SCORED_CELLS = 2**23
"""Maximum number of logits at a time (32 MiB), for prompts of any length; at least those of one token."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of prompt tokens, on the device, with slots and positions on the host."""

    slots: IntArray
    positions: IntArray
    arrays: tuple[Array, ...]
    """Four arrays per chunk of rows, in order: the results of `Ops.logprobs` and `Ops.ranks`."""

    def on_host(self, arrays: list[npt.NDArray[np.generic]]) -> PromptLogprobRows:
        """Return the rows, given `arrays` from the device."""
        chosen, top = (np.concatenate(arrays[kind::4]).astype(np.float32) for kind in (0, 2))
        top_ids, ranks = (np.concatenate(arrays[kind::4]).astype(np.int32) for kind in (1, 3))
        return PromptLogprobRows(self.slots, self.positions, chosen, top_ids=top_ids, top=top, ranks=ranks)


class PromptScorer:
    """Computes log-probabilities of prompts from hidden states, for the slots that request them."""

    def __init__(self, ops: Ops, vocab_size: int) -> None:
        self._ops = ops
        self._rows_at_a_time = max(SCORED_CELLS // vocab_size, 1)
        self.wanted: dict[int, tuple[int, int]] = {}
        """By slot: length of the prompt, and number of top alternatives per token."""

    def admit(self, admission: Admission) -> None:
        """Register a new request, unless it resumes with generated tokens, whose prompt results were delivered
        before."""
        self.wanted.pop(admission.slot, None)
        top_n = admission.params.prompt_logprobs
        if top_n is not None and len(admission.token_ids) == admission.prompt_len:
            self.wanted[admission.slot] = admission.prompt_len, top_n

    def rows(self, spans: Rows) -> tuple[IntArray, IntArray, IntArray] | None:
        """Return the tokens of a step from which prompt tokens are scored; None if there are none.

        int32[r] each: indices into the step's tokens, slots, and positions of the scored tokens, which follow the
        computed ones.
        """
        found: list[tuple[IntArray, IntArray, IntArray]] = [(np.empty(0, np.int32),) * 3]
        begins = spans.begins
        for index, slot in enumerate(spans.slots.tolist()):
            if slot in self.wanted:
                first = int(spans.starts[index])
                count = max(min(int(spans.counts[index]), self.wanted[slot][0] - 1 - first), 0)
                steps = np.arange(count, dtype=np.int32)
                found.append((int(begins[index]) + steps, np.full(count, slot, np.int32), first + 1 + steps))
        places, slots, positions = (np.concatenate(column) for column in zip(*found, strict=True))
        return (places, slots, positions) if len(places) else None

    def score(
        self, states: Array, head: Callable[[Array], Array], rows: tuple[IntArray, IntArray, IntArray], tokens: IntArray
    ) -> PromptScores:
        """Score prompt tokens from states [T, H]; `rows` as above, `tokens` int32[num_slots, *] is the batch."""
        places, slots, positions = rows
        top_n = max(self.wanted[slot][1] for slot in set(slots.tolist()))
        ids, host = tokens[slots, positions], self._ops.from_host
        parts: list[Array] = []
        for begin in range(0, len(places), self._rows_at_a_time):
            part = slice(begin, begin + self._rows_at_a_time)
            logits = head(self._ops.gather_rows(states, host(places[part])))
            chosen = host(ids[part])
            parts += (*self._ops.logprobs(logits, chosen, top_n), self._ops.ranks(logits, chosen))
        return PromptScores(slots, positions, tuple(parts))


@dataclass(frozen=True, slots=True)
class PooledPart:
    """Inputs of one slot's vector in a step."""

    slot: int
    start: int
    """Position of the first token computed."""
    places: IntArray
    """int32[c], indices into the step's tokens, at least one."""
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class PooledParts:
    """Parts with their values on the device."""

    parts: tuple[PooledPart, ...]
    """Parts with states first, those with log-probabilities last."""
    arrays: tuple[Array, ...]
    """States of the former [c, H], if any; then log-probabilities of the latter [m], if any."""
    shift: npt.NDArray[np.float32] | None = None
    """float32[H], added to each state."""

    def on_host(self, arrays: list[npt.NDArray[np.generic]]) -> PooledRows:
        """Return the vectors, given `arrays` from the device."""
        values: list[npt.NDArray[np.float32]] = []
        for array, group in zip(arrays, filter(None, _grouped(self.parts)), strict=True):
            ends = accumulate((len(part.pooling.token_ids) or len(part.places) for part in group), initial=0)
            for part, (begin, end) in zip(group, pairwise(ends), strict=True):
                value = np.asarray(array[begin:end], np.float64)
                if part.pooling.kind != "tokens":
                    value = value if self.shift is None else value + self.shift
                    value = value.reshape(-1) if part.pooling.kind == "all" else value.sum(axis=0)
                values.append(value.astype(np.float32))
        columns = zip(*((part.slot, part.start, len(part.places)) for part in self.parts), strict=True)
        slots, starts, counts = (np.array(column, np.int32) for column in columns)
        return PooledRows(slots, starts, counts, values=tuple(values))


class Pooler:
    """Computes vectors of prompts from hidden states, for the slots that request them."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.wanted: dict[int, tuple[int, Pooling]] = {}
        """By slot: length of the prompt, and its pooling."""
        self.shift: npt.NDArray[np.float32] | None = None
        """See `PooledParts.shift`."""

    def admit(self, admission: Admission) -> None:
        """Register the pooling of a new request."""
        self.wanted.pop(admission.slot, None)
        if admission.pooling is not None:
            self.wanted[admission.slot] = admission.prompt_len, admission.pooling

    def parts(self, spans: Rows) -> tuple[PooledPart, ...]:
        """Return the inputs of vectors that a step computes."""
        found = []
        begins = spans.begins
        for index, slot in enumerate(spans.slots.tolist()):
            if slot not in self.wanted:
                continue
            prompt_len, pooling = self.wanted[slot]
            begin, start, count = int(begins[index]), int(spans.starts[index]), int(spans.counts[index])
            last = -start if pooling.kind == "cls" else prompt_len - 1 - start
            first = 0 if pooling.kind in ("mean", "all") else last
            places = np.arange(max(first, 0), min(last + 1, count), dtype=np.int32)
            if len(places):
                found.append(PooledPart(slot, start, begin + places, pooling=pooling))
        states, scores = _grouped(found)
        return (*states, *scores)

    def pool(self, states: Array, head: Callable[[Array], Array], parts: tuple[PooledPart, ...]) -> PooledParts:
        """Compute vectors, at least one, from the states [T, H] of the step's tokens."""
        ops, host = self._ops, self._ops.from_host
        arrays: list[Array] = []
        by_state, by_score = _grouped(parts)
        if by_state:
            arrays.append(ops.gather_rows(states, host(np.concatenate([part.places for part in by_state]))))
        if by_score:
            logits = head(ops.gather_rows(states, host(np.concatenate([part.places for part in by_score]))))
            counts = [len(part.pooling.token_ids) for part in by_score]
            rows = np.repeat(np.arange(len(by_score), dtype=np.int32), counts)
            ids = np.concatenate([np.array(part.pooling.token_ids, np.int32) for part in by_score])
            arrays.append(ops.logprobs(ops.gather_rows(logits, host(rows)), host(ids), 0)[0])
        return PooledParts(parts, tuple(arrays), self.shift)


def _grouped(parts: list[PooledPart] | tuple[PooledPart, ...]) -> tuple[list[PooledPart], list[PooledPart]]:
    """Return the parts that use states, and those that use log-probabilities."""
    by_state = [part for part in parts if part.pooling.kind != "tokens"]
    return by_state, [part for part in parts if part.pooling.kind == "tokens"]
