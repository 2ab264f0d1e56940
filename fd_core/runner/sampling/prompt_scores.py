"""Log-probabilities of prompts: the states of a chunk's tokens go through the output projection some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import Array, Ops
from fd_core.runner.inputs.inputs import Rows
from fd_core.types import Admission, IntArray, PromptLogprobRows

SCORED_CELLS = 2**23
"""Logits that exist at a time, 32 MiB, whatever the length of prompts; at least those of one token."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of prompt tokens, still on the device but for where they belong."""

    slots: IntArray
    positions: IntArray
    arrays: tuple[Array, ...]
    """Four arrays for each part of the rows, in order: what `Ops.logprobs` and `Ops.ranks` returned."""

    def on_host(self, arrays: list[npt.NDArray[np.generic]]) -> PromptLogprobRows:
        """Return the rows, given `arrays` from the device."""
        chosen, top_ids, top, ranks = (np.concatenate(arrays[kind::4]) for kind in range(4))
        return PromptLogprobRows(
            self.slots,
            self.positions,
            chosen.astype(np.float32),
            top_ids.astype(np.int32),
            top.astype(np.float32),
            ranks.astype(np.int32),
        )


class PromptScorer:
    """Which slots want the log-probabilities of their prompt, and their way from states of tokens."""

    def __init__(self, ops: Ops, vocab_size: int) -> None:
        self._ops = ops
        self._rows_at_a_time = max(SCORED_CELLS // vocab_size, 1)
        self.wanted: dict[int, tuple[int, int]] = {}
        """By slot: length of the prompt, and most likely tokens reported for each of its tokens."""

    def admit(self, admission: Admission) -> None:
        """Remember what a new residency wants; one that returns with tokens of its text was told already."""
        self.wanted.pop(admission.slot, None)
        top_n = admission.params.prompt_logprobs
        if top_n is not None and len(admission.token_ids) == admission.prompt_len:
            self.wanted[admission.slot] = admission.prompt_len, top_n

    def rows(self, spans: Rows) -> tuple[IntArray, IntArray, IntArray] | None:
        """Return where a step computes states that a prompt token is scored from; None if nowhere.

        int32[r] each: indices into the step's tokens, slots, and positions of the tokens that are scored, which are
        those behind the computed ones.
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
        """Score prompt tokens from states [T, H]; `rows` as above, `tokens` int32[num_slots, *] are all known ones."""
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
