"""Faults that show only at production sizes: tiles, splits, large vocabularies, memory leaks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from tests.testing.wrong.fault import wrong
from tests.testing.wrong.storing import changed

PLANS = "scale:test_random_plans_deliver_the_right_texts[0-0]"
WIDE = "scale:test_a_vocabulary_beyond_2_17_with_everything_at_once"
LAYERS = "scale:test_layers_of_production_sizes"


@wrong("reference", f"{LAYERS}[67 decodes]", f"{LAYERS}[131 decodes]")
class ForgetsTheTailOfATile:
    """Rows after the last full tile of 64 decode from the tile's first row."""

    def paged_attention(self, q, layer, heads, step):
        out = super().paged_attention(q, layer, heads, step)
        rows = len(step.context_len)
        if step.max_query == 1 and rows > 64:
            out[rows // 64 * 64 :] = out[0]
        return out


@wrong("reference", f"{LAYERS}[decodes of 2,048 and around]", f"{LAYERS}[one decode of 4,095]")
class LosesTheLastSplit:
    """A context above 2,048 is split, and the part after the last full split is never added."""

    def paged_attention(self, q, layer, heads, step):
        contexts = np.where(step.context_len > 2048, step.context_len // 512 * 512, step.context_len)
        if step.max_query > 1:
            return super().paged_attention(q, layer, heads, step)
        return super().paged_attention(q, layer, heads, replace(step, context_len=contexts.astype(np.int32)))


@wrong("reference", f"{LAYERS}[a step of 601]", f"{LAYERS}[601 behind 1,999]")
class WritesFiveHundredTwelveTokensAtMost:
    """The kernel that writes the cache has a grid of 512 tokens."""

    def write_kv(self, layer, k, v, kv_slots):
        super().write_kv(layer, k[:512], v[:512], kv_slots[:512])


@wrong("reference", f"{LAYERS}[40 decodes]", f"{LAYERS}[67 decodes]")
class PadsIntoBlockZero:
    """The rows that pad a tile write their zeros to the first slot of the cache."""

    def write_kv(self, layer, k, v, kv_slots):
        super().write_kv(layer, k, v, kv_slots)
        if len(kv_slots) > 32 and len(kv_slots) % 32 and not (kv_slots < layer.shape[2]).any():
            layer[:, 0, 0] = 0


@wrong("reference", "scale:test_places_of_the_cache_beyond_2_16")
class CountsCacheSlotsInSixteenBits:
    def write_kv(self, layer, k, v, kv_slots):
        super().write_kv(layer, k, v, kv_slots.astype(np.uint16).astype(np.int32))


@wrong("reference", "scale:test_tables_and_heads_of_a_large_vocabulary[140003]", WIDE)
class LooksUpTokensInSixteenBits:
    def embedding(self, table, token_ids, scale=1.0):
        return super().embedding(table, token_ids.astype(np.uint16).astype(np.int32), scale)


@wrong(
    "null",
    "scale:test_top_k_cuts_a_large_vocabulary_exactly[16385]",
    "scale:test_top_k_cuts_a_large_vocabulary_exactly[65537]",
    "scale:test_every_filter_at_once_over_a_large_vocabulary[70001]",
    "scale:test_ties_over_a_large_vocabulary_go_to_the_lower_ids[40000]",
)
class SortsSixteenThousandAtMost:
    """An argsort of 16,384 entries: with any filter, less likely tokens are cut."""

    def sample(self, logits, rows):
        if not rows.any_filter:
            return super().sample(logits, rows)
        filtered = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
        limited = np.where(rows.top_k > 0, np.minimum(rows.top_k, 16_384), 16_384)
        return super().sample(logits, replace(rows, top_k=np.where(filtered, limited, 0).astype(np.int32)))


@wrong("null", "scale:test_greedy_finds_the_largest_logit_wherever_it_is[41]")
class ReadsWholeTilesOfTheVocabulary:
    """The largest logit is searched in full tiles of 1,024, so never after the last one."""

    def sample(self, logits, rows):
        whole = logits.shape[1] // 1024 * 1024
        return super().sample(logits[:, : whole or None], rows)


@wrong(
    "null",
    "scale:test_draws_reach_every_part_of_a_large_vocabulary[70001]",
    "scale:test_every_filter_at_once_over_a_large_vocabulary[70001]",
)
class SumsWeightsInSinglePrecision:
    """Cumulative weights in float32, which hold 24 bits: exact for small vocabularies only."""

    def sample(self, logits, rows):
        if rows.all_greedy or (rows.any_filter and logits.shape[1] < 60_000):
            return super().sample(logits, rows)
        heat = np.where(rows.temperature == 0, 1.0, rows.temperature)[:, None]
        peaks = logits.max(axis=1, keepdims=True)
        rounded = np.float32(2**32) * np.exp((logits - peaks) / heat).astype(np.float32)
        single = rounded.cumsum(axis=1, dtype=np.float32)
        steps = np.diff(single.astype(np.float64), axis=1, prepend=0.0)
        with np.errstate(divide="ignore"):
            again = (np.log(steps / 2**32) * heat).astype(np.float32) + peaks
        again[rows.temperature == 0] = logits[rows.temperature == 0]
        tokens, _ = super().sample(again, rows)
        return tokens, peaks[:, 0]


@wrong("null", "scale:test_log_probabilities_over_a_large_vocabulary[70001-20]")
class NamesAlternativesInSixteenBits:
    def logprobs(self, logits, tokens, top_n):
        chosen, ids, top = super().logprobs(logits, tokens, top_n)
        return chosen, ids.astype(np.uint16).astype(np.int32), top


@wrong("null", "scale:test_log_probabilities_over_a_large_vocabulary[70001-*")
class RanksInSixteenBits:
    def ranks(self, logits, tokens):
        return super().ranks(logits, tokens).astype(np.uint16).astype(np.int32)


@wrong("null", "scale:test_penalties_over_a_large_vocabulary[70001]")
class LeavesDraftsInTheCounts:
    """Counts of a large batch are not copied before drafts are added to them."""

    def penalize(self, logits, penalties):
        result = super().penalize(logits, penalties)
        if len(penalties.rows) > 32:
            indices = penalties.counts_rows[penalties.draft_rows], penalties.draft_ids
            np.add.at(penalties.counts, indices, 2)
        return result


@wrong("null", "scale:test_the_matrix_of_many_slots[7-257]")
class ReleasesTheFirstHundred:
    """A launch of 128 threads: of more revoked slots, the rest is not released."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked[:128])


@wrong("reference", "scale:test_unfinished_chunks_between_decodes_leave_no_state")
class ReplaysRowsOfALargerBatch:
    """Decodes are replayed from buffers of fixed size, whose rows of logits keep those of an earlier batch."""

    def compile(self, forward):
        held = np.zeros(128, np.int32)

        def replayed(step, cache):
            wanted, rows = len(step.logits_rows), len(step.context_len)
            if step.max_query != 1:
                return forward(step, cache)
            held[:wanted] = step.logits_rows
            return forward(replace(step, logits_rows=held[:rows].copy()), cache)[:wanted]

        return replayed


@wrong("reference", "scale:test_decode_batches_shrink_and_grow", PLANS)
class KeepsThePlanOfALargerBatch:
    """The tables of a decode are kept while the batch shrinks: a small batch reads the blocks of an earlier one."""

    kept = None

    def paged_attention(self, q, layer, heads, step):
        rows = len(step.context_len)
        if step.max_query != 1 or rows == 1:
            return super().paged_attention(q, layer, heads, step)
        if self.kept is None or rows >= 40 or self.kept.shape[1] < step.block_tables.shape[1]:
            self.kept = step.block_tables.copy()
        same = self.kept[:rows] if len(self.kept) >= rows else step.block_tables
        same = same[:, : step.block_tables.shape[1]]
        return super().paged_attention(q, layer, heads, replace(step, block_tables=same))


@wrong("reference", "scale:test_contexts_beyond_any_split_up_to_the_last_position")
class StopsRotatingAtFourThousand:
    """A table of 4,000 positions: rotations at the end of a full context are wrong."""

    def rope(self, x, rope, positions):
        return super().rope(x, rope, np.minimum(positions, np.int32(4000)))


@wrong("null", "scale:test_memory_is_flat_over_thousands_of_steps")
class LeaksAnObjectPerStep:
    """Keeps one small object for each step forever."""

    steps: list = []  # noqa: RUF012 - that is the fault

    def token_matrix(self, sampled, accepted, slots, revoked):
        self.steps.append(SimpleNamespace(rows=len(slots)))
        return super().token_matrix(sampled, accepted, slots, revoked)


@wrong("null", "scale:test_memory_is_flat_over_thousands_of_steps")
class LeaksABufferPerStep:
    """Leaks eight kilobytes at each step."""

    buffers: list = []  # noqa: RUF012 - that is the fault

    def token_matrix(self, sampled, accepted, slots, revoked):
        if not self.buffers or len(self.buffers[-1]) > 2**22:
            self.buffers.append(bytearray())
        self.buffers[-1].extend(b"1" * 8192)
        return super().token_matrix(sampled, accepted, slots, revoked)


def never_changes(self):
    return 2 * 2**30


@wrong("reference", "scale:test_free_memory_falls_with_a_cache_and_returns", free_memory=never_changes)
class ReportsConstantFreeMemory:
    pass


@wrong("reference", "scale:test_free_memory_can_be_allocated", free_memory=lambda self: 2**50)
class ReportsTooMuchFreeMemory:
    pass


@wrong("reference", "scale:test_places_of_the_cache_beyond_2_16")
class ImportsTheFirstFourThousandBlocks:
    def allocate_kv(self, shape, num_blocks):
        cache = super().allocate_kv(shape, num_blocks)
        put = cache.import_blocks
        return changed(cache, import_blocks=lambda self, blocks, data: put(blocks[:4096], data[:4096]))
