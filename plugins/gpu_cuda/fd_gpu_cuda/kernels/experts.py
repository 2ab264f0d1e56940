"""A mixture of experts in Triton: one product for gate and up of all experts in use, and one for down.

Pairs of a token and one of its experts are sorted by expert on the device. A program computes a tile of outputs of some
pairs of one expert, which it derives from the number of pairs per expert. So shapes do not depend on the routing, and
weights of unused experts are not read. The grid has the maximum number of tiles: surplus programs return at once.
Grouped products: Gale et al., "MegaBlocks" (2022).

The bits of a pair do not depend on the step, see `products`; a token's pairs are summed in its order of experts. So a
token never depends on another token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fd_core.ops.contract import Activation, Array, Experts, PlainActivation

from fd_gpu_cuda.kernel_table import ExpertsKernel
from fd_gpu_cuda.kernels.entry import cdiv, kernel, next_power_of_2
from fd_gpu_cuda.kernels.norms import activated, gated
from fd_gpu_cuda.kernels.products import (
    EVERY_TILE,
    MOST_TOKENS,
    Operands,
    ProductDevice,
    WeightProduct,
    operands,
    span_products,
    stages,
    step_constants,
    step_of,
    widest,
)
from fd_gpu_cuda.packed import StackedExperts

_PAIRS = 2048
_NO_KEY = tl.constexpr(-(0x7FFFFFFF << 32))


def choose(logits: Array, experts: Experts) -> tuple[Array, Array]:
    """Return the experts of each token int32[T, top_k] and their weights float32[T, top_k] of logits [T, experts].

    As `fd_core.ops.torch.ops.route`: by the scores of the logits, with a correction for the choice only, in the best
    groups; the lower id first on a tie. A token that is not finite gets valid experts with weights that are not finite.
    """
    tokens, count = logits.shape
    chosen = torch.empty((tokens, experts.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, experts.top_k), dtype=torch.float32, device=logits.device)
    size, places = next_power_of_2(count), next_power_of_2(experts.top_k)
    constants = {"normalize": experts.normalize, "top_k": experts.top_k, "size": size, "places": places}
    groups = experts.groups if experts.top_groups < experts.groups else 1
    constants |= {"sigmoid": experts.scoring == "sigmoid", "groups": groups, "top_groups": experts.top_groups}
    given = logits, experts.correction_bias, chosen, weights, count, experts.norm_floor, experts.weight_scale
    _choose[(tokens,)](*given, **constants)
    return chosen, weights


def order_by_expert(chosen: Array, experts: int) -> tuple[Array, Array]:
    """Return the indices of the choices [T, top_k], sorted by expert and then in order: int32[T * top_k].

    Also returns the number of choices per expert: int32[experts].
    """
    pairs = chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    counts = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    _order[(experts,)](chosen, order, counts, pairs, block=_PAIRS, num_warps=4)
    return order, counts


@triton.jit
def _key(values, index, size: tl.constexpr):
    """Return integer keys in the order of the values, NaN above all; the low bits prefer the lower index."""
    code = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    code = tl.where(code < 0, code ^ 0x7FFFFFFF, code)
    code = tl.where(values != values, 0x7FFFFFFF, code)
    return (code.to(tl.int64) << 32) + (size - index)


@kernel(do_not_specialize=["floor", "scale"])
def _choose(
    logits_at, bias_at, chosen_at, weights_at,
    experts, floor, scale,
    normalize: tl.constexpr, top_k: tl.constexpr, size: tl.constexpr, places: tl.constexpr,
    sigmoid: tl.constexpr, groups: tl.constexpr, top_groups: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, size)
    real = expert < experts
    logits = tl.load(logits_at + token * experts + expert, mask=real, other=float("-inf"))
    if sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    ranked = logits  # scores of large ones round to 1, but differ
    if bias_at is not None:
        ranked = scores + tl.load(bias_at + expert, mask=real, other=0.0)
    key = _key(ranked, expert, size)
    if groups > 1:
        group = expert // (experts // groups)
        best = tl.zeros((size,), tl.float32)
        for each in tl.static_range(groups):
            mine = tl.where(real & (group == each), key, _NO_KEY)
            first = expert == size - (tl.max(mine, 0) & 0xFFFFFFFF).to(tl.int32)
            total = tl.sum(tl.where(first, ranked, 0.0), 0)
            if bias_at is not None:
                second = expert == size - (tl.max(tl.where(first, _NO_KEY, mine), 0) & 0xFFFFFFFF).to(tl.int32)
                total += tl.sum(tl.where(second, ranked, 0.0), 0)
            best = tl.where(group == each, total, best)
        left = tl.where(real, _key(best, group, size), _NO_KEY)
        for _each in tl.static_range(top_groups):
            left = tl.where(left == tl.max(left, 0), _NO_KEY, left)
        real = real & (left == _NO_KEY)
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
    weights *= scale
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


_COLUMNS = 1024


class GroupedTile(NamedTuple):
    """Tiling of the products of all experts."""

    outputs: int
    pairs: int
    k: int
    num_warps: int
    num_stages: int


def grouped_tile(pairs: int, experts: int, operand: Operands, device: ProductDevice) -> GroupedTile:
    """Choose a tile by the average number of pairs per expert.

    Instructions and the order of sums depend only on the weight and its device, as in `products`.
    """
    average = next_power_of_2(cdiv(pairs, experts))
    columns = min(max(average, 16), 64 if operand.exact else MOST_TOKENS)
    if operand.exact and columns == 32:
        columns = 64  # Triton 3.6 compiles tiles of 32 x 32 wrongly if loads have masks; see `entry.leaking_lane`
    outputs = 32 if operand.exact else widest(operand, device) if columns == MOST_TOKENS else 64
    step = step_of(operand, columns, device)
    count = stages(operand, outputs, columns, step, device, 4 if columns <= 32 else 3)
    return GroupedTile(outputs, columns, step, 8 if columns == MOST_TOKENS else 4, count)


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """Return the maximum number of tiles of pairs, for any distribution over the experts.

    The worst case: as many experts as possible have one pair and one tile; the other pairs need one tile per `tile`
    pairs.
    """
    hit = min(pairs, experts)
    return (pairs - hit) // tile + hit


def expert_mixture(device: ProductDevice, product: WeightProduct) -> ExpertsKernel:
    """Return the mixture of experts of a device; `product` computes the router."""
    compiled: set[Any] = set()

    def mixture(x: Array, experts: Experts, activation: Activation, shared: Array | None) -> Array:
        if not len(x):
            return x.new_empty(x.shape)
        gate_up, down = experts.gate_up, experts.down
        logits = x.new_empty((len(x), len(experts.router)), dtype=experts.router.dtype)
        product(x, experts.router, logits)
        if experts.router_bias is not None:
            logits += experts.router_bias
        chosen, weights = choose(logits, experts)
        create = x.new_empty
        if gate_up.experts < len(experts.router):
            # Pairs of experts on other ranks belong to an expert after the last one: no product writes them.
            create, held = x.new_zeros, chosen - experts.first
            chosen = torch.where((held >= 0) & (held < gate_up.experts), held, gate_up.experts)
        pairs = *order_by_expert(chosen, gate_up.experts), experts.top_k
        inputs, order = x, pairs
        if experts.weighs_inputs:
            inputs, order = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1), (*pairs[:2], 1)
            weights = torch.ones_like(weights)
        inner = x.new_empty(len(pairs[0]), gate_up.out // (1 if experts.ungated else 2))
        multiply(inputs, gate_up, order, inner, experts.ungated or activation, gated=experts.ungated is None)
        each = create(len(pairs[0]), down.out)
        multiply(inner, down, pairs, each)
        y = x.new_empty(len(x), down.out)
        grid = len(x), cdiv(down.out, _COLUMNS)
        _add_up[grid](each, weights, shared, y, down.out, top_k=experts.top_k, tile=_COLUMNS)
        return y

    def multiply(
        x: Array,
        weight: StackedExperts,
        pairs: tuple[Array, Array, int],
        y: Array,
        activation: Activation | PlainActivation | None = None,
        *,
        gated: bool = False,
    ) -> None:
        """Multiply rows by the weight of their pair's expert; `pairs` is the result of `order_by_expert`, and top_k.

        With an activation: rows of tokens [T, in], or of pairs with a top_k of 1, to activated rows [P, out] by expert,
        or [P, out / 2] if gate and up are `gated`. Without: rows [P, in] by expert to rows [P, out] of the pairs in the
        order of tokens.
        """
        operand, (order, counts, top_k) = operands(x, weight.weight), pairs
        form = tuple(operand.form.items())
        key = (x.dtype, weight.experts, weight.out, operand.inputs, operand.values.dtype, form, activation, gated)
        tiles = [grouped_tile(len(order), weight.experts, operand, device)]
        if key not in compiled:
            # Tiles for other numbers of pairs are compiled at the first product, not while requests are served.
            compiled.add(key)
            every = (grouped_tile(each * weight.experts, weight.experts, operand, device) for each in EVERY_TILE)
            tiles = [*dict.fromkeys(every), *tiles]
        given = *operand.arrays, weight.bias, order, counts, y, y.stride(0), weight.experts, weight.out, *operand.sizes
        choice = {"activation": activation, "is_gated": gated, "top_k": top_k, "size": next_power_of_2(weight.experts)}
        for tile in tiles:
            grid = (cdiv(weight.out, tile.outputs), most_tiles(len(order), weight.experts, tile.pairs))
            cutting = {"n": tile.outputs, "m": tile.pairs}
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            _multiply_pairs[grid](*given, **step_constants(operand, tile.k), **choice, **cutting, **options)

    return mixture


@kernel
def _multiply_pairs(
    x_at, x_stride, x_scales_at, values_at, values_stride, scales_at, minima_at, bias_at,
    order_at, counts_at, y_at, y_stride,
    experts, out, inputs, groups,
    bits: tl.constexpr, fp8: tl.constexpr, eight: tl.constexpr, middle: tl.constexpr, grouped: tl.constexpr,
    has_minima: tl.constexpr, group: tl.constexpr, span: tl.constexpr, even: tl.constexpr, activation: tl.constexpr,
    is_gated: tl.constexpr, top_k: tl.constexpr, size: tl.constexpr, n: tl.constexpr, m: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    every = tl.arange(0, size)
    counts = tl.load(counts_at + every, mask=every < experts, other=0)
    tiles = (counts + m - 1) // m
    # Number of experts whose tiles precede this one; all of them for a surplus tile.
    before = tl.cumsum(tiles, 0) <= tile
    expert = tl.sum(before.to(tl.int32), 0)
    if expert < size:
        earlier = tl.sum(tl.where(before, (counts.to(tl.int64) << 32) + tiles, 0), 0)
        count = tl.load(counts_at + expert)
        column = (tile - (earlier & 0xFFFFFFFF).to(tl.int32)) * m + tl.arange(0, m)
        present = column < count
        # Pairs and outputs beyond the last are clamped to it, and not written.
        place = (earlier >> 32).to(tl.int32) + tl.minimum(column, count - 1)
        pair = tl.load(order_at + place)
        output = tl.program_id(0) * n + tl.arange(0, n)
        line = tl.minimum(output, out - 1)
        if is_gated:
            # Gate and up of one element are adjacent in the tile.
            line = line % 2 * (out // 2) + line // 2
        if activation is not None:
            x_row, y_row = (pair // top_k).to(tl.int64), place.to(tl.int64)
        else:
            x_row, y_row = place.to(tl.int64), pair.to(tl.int64)
        line = expert.to(tl.int64) * out + line
        scales_rows = scales_at
        minima_rows = minima_at
        if bits <= 8:
            scales_rows += line * groups
        if has_minima:
            minima_rows += line * groups
        sums = tl.zeros((n, m), tl.int32 if eight and not (fp8 or grouped) else tl.float32)
        x_rows, values_rows = x_at + x_row * x_stride, values_at + line * values_stride
        sums = span_products(
            sums, x_rows, present, values_rows, scales_rows, minima_rows, 0, inputs, inputs, groups,
            bits, fp8, eight, middle, grouped, has_minima, group, span, even, k,
        )  # fmt: skip
        total = tl.trans(sums.to(tl.float32))
        if eight:
            if not grouped:
                total *= tl.load(scales_rows).to(tl.float32)[None, :]
            total *= tl.load(x_scales_at + x_row)[:, None]
        if bias_at is not None:
            total += tl.load(bias_at + line).to(tl.float32)[None, :]
        result = total.to(y_at.dtype.element_ty)
        width = out
        if is_gated:
            gate, up = tl.split(tl.reshape(result, (m, n // 2, 2)))
            result = gated(gate.to(tl.float32), up.to(tl.float32), activation, y_at.dtype.element_ty)
            output = tl.program_id(0) * (n // 2) + tl.arange(0, n // 2)
            width = out // 2
        elif activation is not None:
            result = activated(result.to(tl.float32), activation, y_at.dtype.element_ty)
        at = y_at + y_row[:, None] * y_stride + output[None, :]
        tl.store(at, result, mask=present[:, None] & (output[None, :] < width))


@kernel
def _add_up(each_at, weights_at, shared_at, y_at, hidden, top_k: tl.constexpr, tile: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = column < hidden
    total = tl.zeros((tile,), tl.float32)
    for place in tl.static_range(top_k):
        pair = token * top_k + place
        y = tl.load(each_at + pair * hidden + column, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights_at + pair) * y
    if shared_at is not None:
        total += tl.load(shared_at + token * hidden + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_at + token * hidden + column, total.to(y_at.dtype.element_ty), mask=mask)
