"""Vectors of prompts, for requests that want one instead of a text: from the states of the tokens of each chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import Array, Ops
from fd_core.runner.inputs.inputs import Rows
from fd_core.types import Admission, IntArray, PooledRows, Pooling


@dataclass(frozen=True, slots=True)
class PooledPart:
    """What one slot's vector is made of in a step."""

    slot: int
    start: int
    """Position of the first token computed."""
    places: IntArray
    """int32[c], indices into the step's tokens, at least one."""
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class PooledParts:
    """The same with its numbers, which are still on the device."""

    parts: tuple[PooledPart, ...]
    """Those of log-probabilities stand last."""
    arrays: tuple[Array, ...]
    """States of all places but theirs [c, H], if there are any; then their log-probabilities [m], if there are any."""

    def on_host(self, arrays: list[npt.NDArray[np.generic]]) -> PooledRows:
        """Return the vectors, given `arrays` from the device."""
        values: list[npt.NDArray[np.float32]] = []
        for array, group in zip(arrays, filter(None, _grouped(self.parts)), strict=True):
            ends = accumulate((len(part.pooling.token_ids) or len(part.places) for part in group), initial=0)
            for part, (begin, end) in zip(group, pairwise(ends), strict=True):
                value = np.asarray(array[begin:end], np.float64)
                values.append((value if part.pooling.kind == "tokens" else value.sum(axis=0)).astype(np.float32))
        return PooledRows(
            np.array([part.slot for part in self.parts], np.int32),
            np.array([part.start for part in self.parts], np.int32),
            np.array([len(part.places) for part in self.parts], np.int32),
            tuple(values),
        )


class Pooler:
    """Which slots want a vector of their prompt, and its way from states of tokens."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.wanted: dict[int, tuple[int, Pooling]] = {}
        """By slot: length of the prompt, and what is wanted of it."""

    def admit(self, admission: Admission) -> None:
        """Remember what a new residency wants."""
        self.wanted.pop(admission.slot, None)
        if admission.pooling is not None:
            self.wanted[admission.slot] = admission.prompt_len, admission.pooling

    def parts(self, spans: Rows) -> tuple[PooledPart, ...]:
        """Return what a step computes of the vectors."""
        found = []
        begins = spans.begins
        for index, slot in enumerate(spans.slots.tolist()):
            if slot not in self.wanted:
                continue
            prompt_len, pooling = self.wanted[slot]
            begin, start, count = int(begins[index]), int(spans.starts[index]), int(spans.counts[index])
            last = prompt_len - 1 - start
            first = 0 if pooling.kind == "mean" else last
            places = np.arange(max(first, 0), min(last + 1, count), dtype=np.int32)
            if len(places):
                found.append(PooledPart(slot, start, begin + places, pooling))
        states, scores = _grouped(found)
        return (*states, *scores)

    def pool(self, states: Array, head: Callable[[Array], Array], parts: tuple[PooledPart, ...]) -> PooledParts:
        """Read vectors, at least one, from the states [T, H] of the step's tokens."""
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
        return PooledParts(parts, tuple(arrays))


def _grouped(parts: list[PooledPart] | tuple[PooledPart, ...]) -> tuple[list[PooledPart], list[PooledPart]]:
    """Return the parts that are made of states, and those that are made of log-probabilities."""
    by_state = [part for part in parts if part.pooling.kind != "tokens"]
    return by_state, [part for part in parts if part.pooling.kind == "tokens"]
