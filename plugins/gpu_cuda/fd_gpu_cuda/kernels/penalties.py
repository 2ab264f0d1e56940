"""Changes of logits before a token is chosen: penalties, masks, and numbers added to single cells; one launch each.

`fd_core.ops.contract.Ops` defines them. Only cells that change are written.
"""

from __future__ import annotations

import triton.language as tl

from fd_gpu_cuda.kernels.entry import kernel


@kernel(do_not_specialize=["drafts"])
def penalize(
    logits_at,
    stride,
    rows_at,
    counts_at,
    counts_stride,
    counts_rows_at,
    draft_rows_at,
    draft_ids_at,
    repetition_at,
    presence_at,
    frequency_at,
    vocabulary,
    drafts,
    tile: tl.constexpr,
    chunk: tl.constexpr,
):
    """Apply the penalties of each row to the tokens it has seen. Grid: penalized rows, tiles.

    Launched without fused products and sums: the law rounds each.
    """
    index = tl.program_id(0)
    token = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = token < vocabulary
    counts_row = tl.load(counts_rows_at + index).to(tl.int64)
    counts = tl.load(counts_at + counts_row * counts_stride + token, mask=inside, other=0)
    # The drafts of rows do not fall, so those of this one are between the numbers of those below and up to it.
    first = 0
    last = 0
    for begin in range(0, drafts, chunk):
        place = begin + tl.arange(0, chunk)
        row = tl.load(draft_rows_at + place, mask=place < drafts, other=2147483647)
        first += tl.sum((row < index).to(tl.int32), 0)
        last += tl.sum((row <= index).to(tl.int32), 0)
    for place in range(first, last):
        counts += tl.where(token == tl.load(draft_ids_at + place), 2, 0)
    seen = inside & (counts != 0)
    if tl.max(seen.to(tl.int32), 0) > 0:
        cells = tl.load(rows_at + index).to(tl.int64) * stride + token
        repetition = tl.load(repetition_at + index)
        presence = tl.load(presence_at + index).to(tl.float64)
        frequency = tl.load(frequency_at + index).to(tl.float64)
        logit = tl.load(logits_at + cells, mask=seen, other=0.0)
        logit = tl.where(logit > 0, tl.div_rn(logit, tl.zeros((tile,), tl.float32) + repetition), logit * repetition)
        generated = (counts >> 1).to(tl.float64)
        added = tl.where(generated > 0, presence, 0.0) + frequency * generated
        tl.store(logits_at + cells, logit - added.to(tl.float32), mask=seen)


@kernel
def mask(logits_at, stride, rows_at, bits_at, words, vocabulary, tile: tl.constexpr):
    """Set the logits of tokens whose bit is 0 to -inf. Grid: masked rows, tiles."""
    index = tl.program_id(0)
    row = tl.load(rows_at + index).to(tl.int64)
    token = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = token < vocabulary
    word = tl.load(bits_at + index.to(tl.int64) * words + token // 32, mask=inside, other=0)
    forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    tl.store(logits_at + row * stride + token, -float("inf"), mask=forbidden)


@kernel(do_not_specialize=["count"])
def add(x_at, stride, rows_at, ids_at, values_at, count, tile: tl.constexpr, chunk: tl.constexpr):
    """Add values to single cells in the order in which they are given. Grid: tiles of the values.

    Of the values for one cell the first has all of them added to the cell, one behind the other; so sums of float32 are
    the same each time, and those of one loop over the values. No other program writes that cell.
    """
    own = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = own < count
    cell = tl.load(rows_at + own, mask=inside, other=0).to(tl.int64) * stride
    cell += tl.load(ids_at + own, mask=inside, other=0)
    total = tl.load(x_at + cell, mask=inside, other=0)
    repeats = tl.zeros((tile,), tl.int32)
    for begin in range(0, count, chunk):
        place = begin + tl.arange(0, chunk)
        known = place < count
        other = tl.load(rows_at + place, mask=known, other=0).to(tl.int64) * stride
        other += tl.load(ids_at + place, mask=known, other=0)
        value = tl.load(values_at + place, mask=known, other=0)
        same = (cell[:, None] == other[None, :]) & known[None, :] & inside[:, None]
        repeats += tl.sum((same & (place[None, :] < own[:, None])).to(tl.int32), 1)
        matches = tl.sum(same.to(tl.int32), 1)
        if tl.max(matches, 0) == 1:
            only = tl.sum(tl.where(same, value[None, :], 0), 1).to(total.dtype)
            total = tl.where(matches > 0, total + only, total)
        elif tl.max(matches, 0) > 1:
            for step in range(chunk):
                if begin + step < count:
                    one = tl.load(rows_at + begin + step).to(tl.int64) * stride + tl.load(ids_at + begin + step)
                    total = tl.where(cell == one, total + tl.load(values_at + begin + step), total)
    tl.store(x_at + cell, total, mask=inside & (repeats == 0))
