"""Drafts from hidden states of the target, by an EAGLE-3 head (Li et al., 2025) or a layer of its own checkpoint."""

from __future__ import annotations

import dataclasses

import numpy as np

from fd_core.config import Limits
from fd_core.ops.contract import Array
from fd_core.runner.drafting.contract import DraftContext, Drafter, HiddenStates
from fd_core.runner.drafting.draft_model import greedy, useful_drafts
from fd_core.runner.inputs.inputs import Spans, build_inputs
from fd_core.types import IntArray


class EagleDrafter(Drafter):
    """Greedy continuation by the head, for all slots at once.

    The step itself yields the first draft of each slot, and one forward each further one. These read the head's own
    states in place of the target's, and write KV after the text, so they end with the blocks of the slot: a text that
    ends with a block gets one draft.
    """

    name = "eagle3"
    uses_model = True
    reads_states = True

    def __init__(self, context: DraftContext) -> None:
        self._ops = context.ops
        self._cheap_tokens = context.cheap_tokens

    def allocate(self, limits: Limits) -> None:
        """Allocate only host arrays."""
        self._longest = limits.max_model_len
        self._row_of = np.zeros(limits.max_num_seqs, np.int32)
        """Row of each slot in the results of `read`."""

    def admit(self, slot: int, tokens: IntArray) -> None:
        """Nothing: `read` provides all that a draft depends on."""

    def extend(self, slots: IntArray, tokens: IntArray, counts: IntArray) -> None:
        """Nothing, likewise."""

    def read(self, given: HiddenStates) -> None:
        """Compute the head; keep the states of the slots."""
        self._given, self._states = given, given.head.forward(given.step, given.cache)
        self._row_of[given.slots] = np.arange(len(given.slots), dtype=np.int32)

    def propose(self, slots: IntArray, limit: int) -> tuple[IntArray, IntArray]:
        """Draft token by token; each forward reads the previous token and state on the device."""
        ops, given, head, rows = self._ops, self._given, self._given.head, self._row_of[slots]
        length, room = given.lengths[rows], given.room[rows]
        counts = np.minimum(useful_drafts(len(slots), self._cheap_tokens, limit), self._longest - length)
        counts = np.minimum(counts, 2 + room - length).astype(np.int32)
        tokens, live = np.zeros((len(slots), limit), np.int32), np.flatnonzero(counts > 0)
        if not len(live):
            return tokens, np.zeros_like(counts)
        states = ops.gather_rows(self._states, ops.from_host(rows[live]))
        parts = [(live, self._chosen(states))]
        for step in range(1, int(counts.max())):
            chosen = parts[-1][1]
            left = np.flatnonzero(counts[live] > step).astype(np.int32)
            if len(left) < len(live):
                live, kept = live[left], ops.from_host(left)
                chosen, states = ops.gather_rows(chosen, kept), ops.gather_rows(states, kept)
            spans = Spans(
                slots[live],
                (length[live] + (step - 2)).astype(np.int32),
                np.ones(len(live), np.int32),
                logits_rows=np.arange(len(live), dtype=np.int32),
            )
            inputs = build_inputs(spans, given.tokens, given.tables, given.cache.shape.block_size, ops)
            states = head.forward(dataclasses.replace(inputs, token_ids=chosen, states=states), given.cache)
            parts.append((live, self._chosen(states)))
        fetched = ops.fetch([chosen for _, chosen in parts])
        for column, ((drafted, _), chosen) in enumerate(zip(parts, fetched, strict=True)):
            tokens[drafted, column] = chosen
        return tokens, np.maximum(counts, 0)

    def _chosen(self, states: Array) -> Array:
        """Return the most likely token after each of the states."""
        ops, head = self._ops, self._given.head
        chosen, _ = ops.sample(head.logits(states), greedy(ops, len(states)))
        return chosen if head.ids is None else ops.gather_rows(head.ids, chosen)


class MtpDrafter(EagleDrafter):
    """Likewise by the layer for multi-token prediction of the target's checkpoint, again and again."""

    name = "mtp"
    uses_model = False
