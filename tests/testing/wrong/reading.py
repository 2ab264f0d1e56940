"""Drafters that read hidden states, with one fault each, and the test that detects it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from fd_core.runner.drafting.draft_model import greedy
from fd_core.runner.drafting.eagle import EagleDrafter
from tests.testing.witnesses import Witnesses

WRONG = Witnesses()
noticed = partial(WRONG.breaks, "8")
_TEXTS = "test_drafts_and_texts_depend_on_the_text_alone"


@noticed(_TEXTS)
class ReadsTwice(EagleDrafter):
    def read(self, given):
        given.head.forward(given.step, given.cache)
        super().read(given)


@noticed(_TEXTS)
class ReadsOnlyLastTokens(EagleDrafter):
    """Computes a prompt as if its KV were not needed."""

    def read(self, given):
        rows = given.step.logits_rows
        step = given.step
        last = np.unique(step.query_start[1:] - 1)
        step = replace(
            step,
            token_ids=step.token_ids[last],
            positions=step.positions[last],
            kv_slots=step.kv_slots[last],
            states=step.states[last],
            query_start=np.arange(len(last) + 1, dtype=np.int32),
            logits_rows=np.searchsorted(last, rows).clip(0, len(last) - 1),
        )
        super().read(replace(given, step=step))


@noticed(_TEXTS)
class ReadsTheTokensOfTheStep(EagleDrafter):
    """Gives the head each token with its own state, and not with the one before it."""

    def read(self, given):
        tokens = given.step.token_ids
        super().read(replace(given, step=replace(given.step, token_ids=np.roll(tokens, 1))))


@noticed(_TEXTS)
class TakesRowsForSlots(EagleDrafter):
    def propose(self, slots, limit):
        self._row_of[slots] = np.arange(len(slots))
        return super().propose(slots[::-1].copy(), limit)


@noticed(_TEXTS)
class KeepsTheStatesOfTheLastStep(EagleDrafter):
    """Drafts from the states before the step, of the slots that had some."""

    def read(self, given):
        before = getattr(self, "_states", None)
        super().read(given)
        if before is not None and len(before) == len(self._states):
            self._states = before


@noticed(_TEXTS)
class WritesBeyondItsBlocks(EagleDrafter):
    """Drafts on where the slot has no block: the table has those of its previous request there."""

    def read(self, given):
        super().read(replace(given, room=np.full_like(given.room, 1 << 20)))


@noticed(_TEXTS)
class ComputesRejectedDraftsAgain(EagleDrafter):
    """Computes the head for each draft from the first one on."""

    def propose(self, slots, limit):
        for count in range(1, limit):
            super().propose(slots, count)
        return super().propose(slots, limit)


@noticed(_TEXTS)
class SharesItsRows(EagleDrafter):
    """Has the states of all instances in its class."""

    held: ClassVar[dict] = {}

    def read(self, given):
        super().read(given)
        self.held.update(zip(given.slots.tolist(), self._states, strict=True))

    def propose(self, slots, limit):
        for slot in slots.tolist():
            self._states[self._row_of[slot]] = self.held[slot]
        return super().propose(slots, limit)


@noticed("test_memory_of_past_requests_is_freed")
class KeepsItsStates(EagleDrafter):
    """Keeps the states of all steps."""

    def read(self, given):
        super().read(given)
        self._all = [*getattr(self, "_all", []), self._states]


@noticed(_TEXTS)
class TakesRowsOfTheHeadForIds(EagleDrafter):
    """The head knows some of the tokens in another order."""

    def _chosen(self, states):
        return self._ops.sample(self._given.head.logits(states), greedy(self._ops, len(states)))[0]


@noticed(_TEXTS)
class DraftsBeyondTheContext(EagleDrafter):
    def allocate(self, limits):
        super().allocate(limits)
        self._longest = 2**30


@noticed(_TEXTS)
class NeverDrafts(EagleDrafter):
    def propose(self, slots, limit):
        return np.zeros((len(slots), limit), np.int32), np.zeros(len(slots), np.int32)


@noticed(_TEXTS)
class HasNoHeadLoaded(EagleDrafter):
    reads_states = False
