"""Faults in the signals of a step: -1, -9, rows, drafts, the budget."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID
from tests.testing.wrong.fault import ANSWERED, IN_ENGINES, wrong


@wrong("null", ANSWERED, spreads_to=IN_ENGINES)
class ReleasesOneStepLate:
    late = np.empty(0, np.int32)

    def token_matrix(self, sampled, accepted, slots, revoked):
        now, self.late = self.late, np.array(revoked)
        return super().token_matrix(sampled, accepted, slots, np.setdiff1d(now, slots))


@wrong("null", ANSWERED, spreads_to=IN_ENGINES)
class ReleasesOneStepEarly:
    """Takes a slot without a row for a revoked one, and releases it too early."""

    rows = np.empty(0, np.int32)

    def token_matrix(self, sampled, accepted, slots, revoked):
        gone = np.setdiff1d(self.rows, slots)
        self.rows = np.array(slots)
        return super().token_matrix(sampled, accepted, slots, np.union1d(gone, revoked))


@wrong(
    "null",
    ANSWERED,
    spreads_to=(*IN_ENGINES, "lifetime:test_closed_or_sleeping_engine_frees_its_cache_and_weights*"),
)
class ReleasesAnIdleSlot:
    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        idle = np.flatnonzero((matrix[:, 0] == EMPTY_TOKEN_ID) & (np.arange(len(matrix)) == len(matrix) - 1))
        matrix[idle, 0] = PREEMPTED_TOKEN_ID
        return matrix


@wrong("null", ANSWERED)
class DropsRowsAfterARelease:
    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        for slot in revoked:
            rest = matrix[slot + 1 :]
            rest[rest[:, 0] != PREEMPTED_TOKEN_ID] = EMPTY_TOKEN_ID
        return matrix


@wrong(
    "null",
    "signals:test_each_slot_of_random_plans_is_answered[3]",
    "signals:test_no_negative_id_reaches_log_probabilities[3]",
)
class ReleasesInEveryColumn:
    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        matrix[revoked] = PREEMPTED_TOKEN_ID
        return matrix


@wrong(
    "null",
    ANSWERED,
    spreads_to=(
        "budget:test_the_smallest_legal_budget_brings_everybody_to_the_end*",
        "signals:test_a_text_that_ends_while_it_drains_is_not_requeued",
        "signals:test_no_negative_id_reaches_log_probabilities*",
    ),
)
class LeavesAStaleToken:
    """Keeps the matrix on the device and writes only the rows that sample."""

    matrix = None

    def token_matrix(self, sampled, accepted, slots, revoked):
        fresh = super().token_matrix(sampled, accepted, slots, revoked)
        if self.matrix is not None and self.matrix.shape == fresh.shape:
            idle = np.setdiff1d(np.arange(len(fresh)), np.union1d(slots, revoked))
            idle = idle[self.matrix[idle, 0] != PREEMPTED_TOKEN_ID]
            fresh[idle] = self.matrix[idle]
        self.matrix = fresh.copy()
        return fresh


@wrong("null", ANSWERED, spreads_to=IN_ENGINES)
class HangsOnAnEmptyBatch:
    def token_matrix(self, sampled, accepted, slots, revoked):
        if not len(slots) and len(revoked) and threading.current_thread().name == "fdcore-device":
            threading.Event().wait(2)
        return super().token_matrix(sampled, accepted, slots, revoked)


@wrong("null", "cases:test_operation[sample:*", ANSWERED, spreads_to=IN_ENGINES)
class SwapsRows:
    def sample(self, logits, rows):
        tokens, peaks = super().sample(logits, rows)
        return tokens[::-1].copy(), peaks


@wrong("null", "cases:test_operation[verify:*", "signals:test_each_slot_of_random_plans_is_answered[3]")
class AcceptsOneDraftTooMany:
    def verify(self, sampled, drafts, num_drafts):
        return np.minimum(super().verify(sampled, drafts, num_drafts) + 1, num_drafts).astype(np.int32)


@wrong("null", "signals:test_no_negative_id_reaches_log_probabilities*")
class ShowsReleasesInLogprobs:
    """Its buffer of ids is that of the matrix."""

    released = False

    def token_matrix(self, sampled, accepted, slots, revoked):
        self.ops.released = len(revoked) > 0
        return super().token_matrix(sampled, accepted, slots, revoked)

    def logprobs(self, logits, tokens, top_n):
        chosen, top_ids, top = super().logprobs(logits, tokens, top_n)
        if self.released:
            top_ids[:, -1:] = PREEMPTED_TOKEN_ID
        return chosen, top_ids, top


@wrong("null", "budget:test_a_budget_equal_to_the_demand_serves_every_decode[0]", spreads_to=(ANSWERED,))
class CountsOneForEachDecode:
    """Pads a step to the next power of two of tokens without charging for it."""

    def compile(self, forward):
        def padded(step, cache):
            total = len(step.token_ids)
            more = (1 << (total - 1).bit_length()) - total
            if not more or step.max_query > 1:
                return forward(step, cache)
            spare = cache.num_blocks * cache.shape.block_size - 1
            return forward(
                replace(
                    step,
                    token_ids=np.concatenate([step.token_ids, np.zeros(more, np.int32)]),
                    positions=np.concatenate([step.positions, np.zeros(more, np.int32)]),
                    kv_slots=np.concatenate([step.kv_slots, np.full(more, spare, np.int32)]),
                    query_start=np.concatenate(
                        [step.query_start, np.arange(total + 1, total + more + 1, dtype=np.int32)]
                    ),
                    context_len=np.concatenate([step.context_len, np.ones(more, np.int32)]),
                    block_tables=np.pad(step.block_tables, ((0, more), (0, 0))),
                ),
                cache,
            )

        return padded


@wrong(
    "null",
    "budget:test_padding_never_exceeds_the_budget*",
    spreads_to=(*IN_ENGINES, "lifetime:test_closed_or_sleeping_engine_frees_its_cache_and_weights*"),
)
class PadsBeyondTheBudget:
    def padded(self, rows, width):
        return (max(rows, 8), 1) if width == 1 else None
