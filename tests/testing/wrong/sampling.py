"""Faults in sampling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.testing.wrong.fault import wrong


@wrong(
    "null",
    "sampling:test_top_k_cuts_before_top_p",
    "sampling:test_a_large_vocabulary_with_every_filter",
)
class CutsByTopPFirst:
    def sample(self, logits, rows):
        if not rows.any_filter:
            return super().sample(logits, rows)
        kept = logits.copy()
        for row in range(len(logits)):
            order = np.argsort(-logits[row], kind="stable")
            heat = rows.temperature[row] or 1.0
            weights = np.exp((logits[row][order].astype(np.float64) - logits[row].max()) / heat)
            before = weights.cumsum() - weights
            cut = order[1:][before[1:] >= rows.top_p[row] * weights.sum()]
            kept[row, cut] = -np.inf
        return super().sample(kept, replace(rows, top_p=np.ones_like(rows.top_p)))


@wrong(
    "null",
    "sampling:test_chooses_the_token_that_the_contract_defines",
    "sampling:test_greedy_takes_the_lowest_id_on_a_tie",
)
class TiesGoToTheHigherId:
    def sample(self, logits, rows):
        last = logits.shape[1] - 1 - logits[:, ::-1].argmax(axis=1)
        tokens, peaks = super().sample(logits, rows)
        return np.where(rows.temperature == 0, last, tokens).astype(np.int32), peaks


@wrong(
    "null",
    "sampling:test_chooses_the_token_that_the_contract_defines",
    "sampling:test_seed_and_position_decide",
    "sampling:test_a_large_vocabulary_with_every_filter",
    spreads_to=(
        "golden:test_batching_changes_no_text*",
        "golden:test_chunking_changes_no_text*",
        "golden:test_forced_tokens_appear_in_place_and_change_no_others*",
        "golden:test_speculation_changes_no_text*",
        "golden:test_the_size_of_blocks_changes_no_text*",
    ),
)
class IgnoresSeeds:
    def sample(self, logits, rows):
        return super().sample(logits, replace(rows, seeds=np.zeros_like(rows.seeds)))


@wrong(
    "null",
    "sampling:test_chooses_the_token_that_the_contract_defines",
    "sampling:test_greedy_rows_stay_greedy_next_to_random_ones",
    "sampling:test_top_k_keeps_the_lower_id_on_a_tie",
    "sampling:test_min_p_leaves_out_what_is_much_less_likely",
    "sampling:test_seed_and_position_decide",
    "sampling:test_a_boundary_belongs_to_the_next_token",
    "sampling:test_a_large_vocabulary_with_every_filter",
    "sampling:test_token_frequencies_match_their_probabilities",
    "sampling:test_forbidden_tokens_are_never_drawn",
    "sampling:test_temperature_divides_logits*",
    spreads_to=(
        "golden:test_batching_changes_no_text*",
        "golden:test_chunking_changes_no_text*",
        "golden:test_forced_tokens_appear_in_place_and_change_no_others*",
        "golden:test_speculation_changes_no_text*",
        "golden:test_the_size_of_blocks_changes_no_text*",
    ),
)
class IgnoresPositions:
    def sample(self, logits, rows):
        return super().sample(logits, replace(rows, positions=np.zeros_like(rows.positions)))


@wrong(
    "null",
    "sampling:test_min_p_leaves_out_what_is_much_less_likely",
    "sampling:test_a_large_vocabulary_with_every_filter",
    spreads_to=("sampling:test_chooses_the_token_that_the_contract_defines",),
)
class ForgetsMinP:
    def sample(self, logits, rows):
        return super().sample(logits, replace(rows, min_p=np.zeros_like(rows.min_p)))


@wrong(
    "null",
    "sampling:test_greedy_rows_stay_greedy_next_to_random_ones",
    "sampling:test_a_large_vocabulary_with_every_filter",
    "sampling:test_a_row_does_not_depend_on_its_neighbours",
    spreads_to=(
        "sampling:test_chooses_the_token_that_the_contract_defines",
        "signals:test_a_request_whose_logits_are_not_finite_fails_alone*",
        "golden:test_batching_changes_no_text*",
        "golden:test_chunking_changes_no_text*",
        "golden:test_forced_tokens_appear_in_place_and_change_no_others*",
        "golden:test_speculation_changes_no_text*",
        "golden:test_the_size_of_blocks_changes_no_text*",
    ),
)
class DrawsGreedyRows:
    """A greedy row in a batch with random ones is sampled, too."""

    def sample(self, logits, rows):
        heat = rows.temperature if rows.all_greedy else np.where(rows.temperature == 0, np.float32(1), rows.temperature)
        return super().sample(logits, replace(rows, temperature=heat))


@wrong(
    "null",
    "sampling:test_non_finite_row_is_reported_without_affecting_others*",
    "signals:test_a_request_whose_logits_are_not_finite_fails_alone*",
)
class HidesNonFiniteLogits:
    def sample(self, logits, rows):
        tokens, peaks = super().sample(logits, rows)
        return tokens, np.nan_to_num(peaks)


@wrong(
    "null",
    "sampling:test_repetition_penalty_lowers_logits_of_either_sign",
    "sampling:test_penalties_are_those_of_the_definition*",
    "sampling:test_penalties_of_a_real_vocabulary_are_the_oracles",
)
class AppliesPenaltiesTwice:
    def penalize(self, logits, penalties):
        return super().penalize(super().penalize(logits, penalties), penalties)


@wrong(
    "null",
    "sampling:test_penalties_are_those_of_the_definition*",
    "sampling:test_penalties_of_a_real_vocabulary_are_the_oracles",
    spreads_to=("golden:test_speculation_changes_no_text*",),
)
class PenalizesWithoutDrafts:
    def penalize(self, logits, penalties):
        none = np.empty(0, np.int32)
        return super().penalize(logits, replace(penalties, draft_rows=none, draft_ids=none))


@wrong(
    "null",
    "sampling:test_adds_to_single_logits_and_sums_repeated_places",
    "sampling:test_counts_of_tokens_are_written_and_added_to",
    spreads_to=("golden:test_speculation_changes_no_text*",),
)
class KeepsOneOfRepeatedIndices:
    def add_at(self, x, rows, ids, values):
        x[rows, ids] += values
        return x


@wrong(
    "null",
    "golden:test_log_probabilities_are_those_of_a_run_alone*",
    "golden:test_log_probabilities_of_prompts_are_the_oracles*",
    "golden:test_log_probabilities_of_prompts_survive_preemption",
    "sampling:test_logprobs_are_sorted_and_ties_go_to_the_lower_id",
    "signals:test_no_negative_id_reaches_log_probabilities*",
)
class SortsLogprobsBackwards:
    def logprobs(self, logits, tokens, top_n):
        chosen, top_ids, top = super().logprobs(logits, tokens, top_n)
        return chosen, top_ids[:, ::-1], top[:, ::-1]


@wrong(
    "null",
    "golden:test_log_probabilities_of_prompts_are_the_oracles*",
    "golden:test_log_probabilities_of_prompts_survive_preemption",
    "sampling:test_ranks_count_from_one_and_ties_go_to_the_lower_id",
)
class CountsRanksFromZero:
    def ranks(self, logits, tokens):
        return super().ranks(logits, tokens) - 1


MASKED = "sampling:test_masked_tokens_become_impossible_and_no_others"
ONE_LEFT = "sampling:test_the_mask_of_a_single_token_leaves_that_token"
MASKED_REQUEST = "signals:test_a_request_whose_logits_are_not_finite_fails_alone*"


@wrong("null", f"{MASKED}[9]", f"{MASKED}[33]", f"{MASKED}[1003]", ONE_LEFT, spreads_to=("golden:*", MASKED_REQUEST))
class IgnoresTheLastPartialWord:
    """Only whole words are read: the tokens after them stay as they are."""

    def mask_logits(self, logits, rows, bits):
        whole = logits.shape[1] // 32
        return np.concatenate(
            [super().mask_logits(logits[:, : 32 * whole].copy(), rows, bits[:, :whole]), logits[:, 32 * whole :]],
            axis=1,
        )


@wrong("null", f"{MASKED}*", ONE_LEFT, spreads_to=("golden:*", MASKED_REQUEST))
class ShiftsMasksByOne:
    """Bit 0 is used for token 1."""

    def mask_logits(self, logits, rows, bits):
        return np.roll(super().mask_logits(np.roll(logits, -1, axis=1), rows, bits), 1, axis=1)


@wrong("null", f"{MASKED}*", ONE_LEFT, spreads_to=("golden:*", MASKED_REQUEST))
class ReadsMasksFromTheHighestBit:
    def mask_logits(self, logits, rows, bits):
        reversed_bits = np.unpackbits(bits[:, :, None].view(np.uint8), axis=2, bitorder="little")[:, :, ::-1]
        words = np.packbits(reversed_bits, axis=2, bitorder="little").view(np.int32)[:, :, 0]
        return super().mask_logits(logits, rows, words)


@wrong("null", f"{MASKED}*", spreads_to=("golden:*", MASKED_REQUEST))
class MasksRowsInOrder:
    """The first mask is applied to the first row, not to the row that it names."""

    def mask_logits(self, logits, rows, bits):
        return super().mask_logits(logits, np.arange(len(rows)), bits)


@wrong("null", f"{MASKED}*", spreads_to=("golden:*", MASKED_REQUEST))
class MasksRowsThatAreNotNamed:
    """All tokens of rows without a mask are forbidden."""

    def mask_logits(self, logits, rows, bits):
        masked = super().mask_logits(logits.copy(), rows, bits)
        if len(rows):
            masked[~np.isin(np.arange(len(logits)), rows)] = -np.inf
        return masked


@wrong("null", f"{MASKED}*", ONE_LEFT, spreads_to=("golden:*", MASKED_REQUEST))
class LosesTheSignBitOfMasks:
    """A word is read as a signed number: its highest bit is never set."""

    def mask_logits(self, logits, rows, bits):
        return super().mask_logits(logits, rows, bits & 0x7FFFFFFF)


@wrong("null", f"{MASKED}*", spreads_to=("golden:*", MASKED_REQUEST))
class AddsMasksToLogits:
    """-inf is added: a logit that is NaN stays NaN."""

    def mask_logits(self, logits, rows, bits):
        return logits + super().mask_logits(np.zeros_like(logits), rows, bits)
