"""What follows sampling: drafts that are kept, and the token matrix of a step; one launch each."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["accept"]


@triton.jit(do_not_specialize=["rows", "stride"])
def accept(sampled_at, stride, drafts_at, drafts_stride, num_drafts_at, accepted_at, rows, k, tile: tl.constexpr):
    """Count the drafts of each row that equal what was sampled in their place, up to the first that does not."""
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = row < rows
    count = tl.load(num_drafts_at + row, mask=inside, other=0)
    accepted = tl.zeros((tile,), tl.int32)
    for place in range(k):
        sampled = tl.load(sampled_at + row * stride + place, mask=inside, other=-1)
        draft = tl.load(drafts_at + row * drafts_stride + place, mask=inside, other=-2)
        right = (sampled == draft) & (place < count) & (accepted == place)
        accepted += right.to(tl.int32)
    tl.store(accepted_at + row, accepted, mask=inside)
