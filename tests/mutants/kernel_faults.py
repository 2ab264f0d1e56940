"""Faults in the C++ of attention over long contexts; `judge_kernels` compiles and judges them."""

from __future__ import annotations

from tests.mutants.mutant import mutant

__all__ = ["KERNEL_FAULTS"]

ATTENTION = "ops/native/csrc/attention/attention.cpp"
PLAN = "ops/native/csrc/attention/attention_plan.cpp"

KERNEL_FAULTS = (
    mutant(
        "sums-before-a-span-keep-their-scale",
        "4: a text does not depend on the split of its context",
        (ATTENTION, "vexp2(vload(into.max + row) - max)", "vexp2(vload(into.max + row) - vload(into.max + row))"),
    ),
    mutant(
        "a-span-does-not-add-to-the-sum-of-weights",
        "4: a text does not depend on the split of its context",
        (ATTENTION, "into.sum[row] * s.before[row] + from.sum[row] * s.now[row]", "into.sum[row] * s.before[row]"),
    ),
    mutant(
        "spans-are-merged-from-the-last",
        "4: a row has the same bits with any number of threads",
        (ATTENTION, "for (int span = 0; span < tile.spans; span++)", "for (int span = tile.spans; span-- > 0;)"),
    ),
    mutant(
        "the-last-span-is-not-merged",
        "4: a text does not depend on the split of its context",
        (ATTENTION, "span < tile.spans; span++", "span < tile.spans - 1; span++"),
    ),
    mutant(
        "spans-are-shorter-where-threads-share-them",
        "4: a row has the same bits with any number of threads",
        (
            PLAN,
            "span_blocks = std::max(1, kSpanTokens / (chunk_blocks * block_size)) * chunk_blocks;",
            "span_blocks = std::max(1, kSpanTokens / threads / (chunk_blocks * block_size)) * chunk_blocks;",
        ),
    ),
)
