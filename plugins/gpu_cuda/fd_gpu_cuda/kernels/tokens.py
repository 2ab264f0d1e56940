"""What follows sampling: how many drafts are kept, and the token matrix of a step; one launch each."""

from __future__ import annotations

import triton.language as tl

from fd_gpu_cuda.kernels.entry import kernel


@kernel(do_not_specialize=["rows", "stride"])
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


@kernel(do_not_specialize=["stride", "rows", "revoked"])
def write_matrix(
    sampled_at,
    stride,
    accepted_at,
    slots_at,
    revoked_at,
    matrix_at,
    rows,
    revoked,
    num_slots,
    width,
    empty: tl.constexpr,
    preempted: tl.constexpr,
    tile: tl.constexpr,
    chunk: tl.constexpr,
):
    """Write the token matrix [num_slots, width]. Grid: tiles of slots.

    Each slot looks for its row and for its revocation among all, so each cell is written once, by one program.
    """
    slot = tl.program_id(0) * tile + tl.arange(0, tile)
    row = tl.full((tile,), -1, tl.int32)
    for begin in range(0, rows, chunk):
        place = begin + tl.arange(0, chunk)
        owner = tl.load(slots_at + place, mask=place < rows, other=-1)
        row = tl.maximum(row, tl.max(tl.where(slot[:, None] == owner[None, :], place[None, :], -1), 1))
    released = tl.zeros((tile,), tl.int32)
    for begin in range(0, revoked, chunk):
        place = begin + tl.arange(0, chunk)
        owner = tl.load(revoked_at + place, mask=place < revoked, other=-1)
        released |= tl.max((slot[:, None] == owner[None, :]).to(tl.int32), 1)
    accepted = tl.load(accepted_at + row, mask=row >= 0, other=-1)
    for column in range(width):
        token = tl.load(sampled_at + row * stride + column, mask=column <= accepted, other=empty)
        if column == 0:
            token = tl.where(released > 0, preempted, token)
        tl.store(matrix_at + slot * width + column, token, mask=slot < num_slots)
