"""Which experts a token goes to, and which tokens an expert gets, in Triton; the host looks at neither."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fd_core.ops.contract import Array, Experts

from fd_gpu_cuda.kernels.entry import kernel

_PAIRS = 2048
_NO_KEY = tl.constexpr(-(0x7FFFFFFF << 32))


def choose(logits: Array, experts: Experts) -> tuple[Array, Array]:
    """Return the experts of each token int32[T, top_k] and their weights float32[T, top_k] of logits [T, experts].

    As `fd_core.ops.torch.ops.route`: by the softmax of the logits, corrected for the choice only; the lower id first on
    a tie. Experts of a token that is not finite are real ones, with weights that are not finite.
    """
    tokens, count = logits.shape
    chosen = torch.empty((tokens, experts.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, experts.top_k), dtype=torch.float32, device=logits.device)
    _choose[(tokens,)](
        logits,
        experts.correction_bias,
        chosen,
        weights,
        count,
        experts.norm_floor,
        corrected=experts.correction_bias is not None,
        normalize=experts.normalize,
        top_k=experts.top_k,
        size=triton.next_power_of_2(count),
        places=triton.next_power_of_2(experts.top_k),
    )
    return chosen, weights


def order_by_expert(chosen: Array, experts: int) -> tuple[Array, Array]:
    """Return the places of the choices [T, top_k], counted from 0, by expert and then in order: int32[T * top_k].

    With it goes how many each expert has: int32[experts].
    """
    pairs = chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    counts = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    _order[(experts,)](chosen, order, counts, pairs, block=_PAIRS, num_warps=4)
    return order, counts


@kernel(do_not_specialize=["floor"])
def _choose(
    logits_at,
    bias_at,
    chosen_at,
    weights_at,
    experts,
    floor,
    corrected: tl.constexpr,
    normalize: tl.constexpr,
    top_k: tl.constexpr,
    size: tl.constexpr,
    places: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, size)
    real = expert < experts
    logits = tl.load(logits_at + token * experts + expert, mask=real, other=float("-inf"))
    scores = tl.exp(logits - tl.max(logits, 0))
    scores = scores / tl.sum(scores, 0)
    ranked = scores
    if corrected:
        ranked += tl.load(bias_at + expert, mask=real, other=0.0)
    # Whole numbers in the order of the scores, NaN above all; behind each what prefers the lower expert.
    code = tl.where(ranked == 0.0, 0.0, ranked).to(tl.int32, bitcast=True)
    code = tl.where(code < 0, code ^ 0x7FFFFFFF, code)
    code = tl.where(ranked != ranked, 0x7FFFFFFF, code)
    key = (code.to(tl.int64) << 32) + (size - expert)
    key = tl.where(real, key, _NO_KEY)
    place = tl.arange(0, places)
    chosen = tl.zeros((places,), tl.int32)
    weights = tl.zeros((places,), tl.float32)
    total = 0.0
    for rank in tl.static_range(top_k):
        best = size - (tl.max(key, 0) & 0xFFFFFFFF).to(tl.int32)
        weight = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        key = tl.where(expert == best, _NO_KEY, key)
        chosen = tl.where(place == rank, best, chosen)
        weights = tl.where(place == rank, weight, weights)
        total += weight
    if normalize:
        weights /= tl.maximum(total, floor)
    at = token * top_k + place
    tl.store(chosen_at + at, chosen, mask=place < top_k)
    tl.store(weights_at + at, weights, mask=place < top_k)


@kernel(do_not_specialize=["pairs"])
def _order(chosen_at, order_at, counts_at, pairs, block: tl.constexpr):
    expert = tl.program_id(0)
    lane = tl.arange(0, block)
    before = tl.zeros((block,), tl.int32)
    for begin in range(0, pairs, block):
        chosen = tl.load(chosen_at + begin + lane, mask=begin + lane < pairs, other=expert)
        before += (chosen < expert).to(tl.int32)
    first = tl.sum(before, 0)
    at = first
    for begin in range(0, pairs, block):
        place = begin + lane
        chosen = tl.load(chosen_at + place, mask=place < pairs, other=-1)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order_at + at + tl.cumsum(mine, 0) - 1, place, mask=mine > 0)
        at += tl.sum(mine, 0)
    tl.store(counts_at + expert, at - first)
