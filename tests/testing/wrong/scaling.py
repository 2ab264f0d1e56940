"""Faults that show only at production sizes: tiles, splits, large vocabularies, memory leaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.testing.wrong.fault import wrong
from tests.testing.wrong.storing import changed

PLANS = "scale:test_random_plans_deliver_the_right_texts[0-0]"


@wrong("null", "scale:test_the_matrix_of_many_slots[7-257]")
class ReleasesTheFirstHundred:
    """A launch of 128 threads: of more revoked slots, the rest is not released."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked[:128])


@wrong("reference", PLANS)
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
class LeaksABufferPerStep:
    """Leaks eight kilobytes at each step."""

    buffers: list = []  # noqa: RUF012 - that is the fault

    def token_matrix(self, sampled, accepted, slots, revoked):
        if not self.buffers or len(self.buffers[-1]) > 2**22:
            self.buffers.append(bytearray())
        self.buffers[-1].extend(b"1" * 8192)
        return super().token_matrix(sampled, accepted, slots, revoked)


@wrong("null", "scale:test_memory_is_flat_over_thousands_of_steps")
class KeepsStagingBuffers:
    """A cache holds the buffer of each export, which must outlive a copy, until it is freed itself."""

    def allocate_kv(self, shape, num_blocks):
        cache, staged = super().allocate_kv(shape, num_blocks), []
        get = cache.export_blocks

        def export_blocks(self, blocks):
            staged.append(get(blocks))
            return staged[-1].copy()

        return changed(cache, export_blocks=export_blocks)


def never_changes(self):
    return 2 * 2**30


@wrong("reference", "scale:test_free_memory_falls_with_a_cache_and_returns", free_memory=never_changes)
class ReportsConstantFreeMemory:
    pass


@wrong("reference", "scale:test_free_memory_can_be_allocated", free_memory=lambda self: 2**50)
class ReportsTooMuchFreeMemory:
    pass


@wrong("reference", "scale:test_texts_are_right_at_any_number_of_steps")
class NumbersLaunchesInSixteenBits:
    """The number of a launch marks what was computed, and 0 what was not: that of the launch after the last one."""

    launch, partial = 0, None

    def paged_attention(self, q, layer, heads, step):
        self.launch = (self.launch + 1) % 2**16
        found = super().paged_attention(q, layer, heads, step)
        is_stale = self.launch == 0 and self.partial is not None and self.partial.shape == found.shape
        self.partial = self.partial if is_stale else found
        return self.partial.copy()


@wrong(
    "reference",
    "scale:test_compiled_decode_reads_its_whole_context*",
    spreads_to=("scale:test_contexts_beyond_any_split_up_to_the_last_position",),
)
class CapturesEightThousandTokens:
    """The grid of a captured decode has splits for 8,192 tokens."""

    def compile(self, forward):
        def replay(step, cache):
            most = 8192 if step.max_query == 1 else step.max_context
            return forward(
                replace(
                    step,
                    context_len=np.minimum(step.context_len, most),
                    max_context=min(step.max_context, most),
                    host=None,
                ),
                cache,
            )

        return replay
