"""Attention compared with its definition, and layers whose cache and residual stream are in rare states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fd_core.config.envelope import OperatingEnvelope
from fd_core.ops.contract import DESCRIBED_BY, Heads, KVShape, Ops
from fd_core.ops.numpy.kv_8bit import dequantize_kv, quantize_kv
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.weights import WEIGHT_FORMATS
from fd_core.testing.models.arrays import (
    TOLERANCE,
    Floats,
    Values,
    activations,
    assert_near,
    heads_on,
    no_rope,
    on_device,
    step_input,
)
from fd_core.testing.models.layers import Geometry, LayerOn

REQUIRES = ("primitives", "kv_transfer")

Require = Callable[..., None]
_BELOW_FINITE_MASKS = -14_336
"""Exact in every dtype with its factors."""
_LONG = 16_400
"""Tokens of a context that packs divide."""


ROWS = {
    "decode": [(1, 1), (1, 9), (1, 4)],
    "prefill": [(6, 6)],
    "mixed": [(1, 9), (5, 5), (3, 10), (1, 1), (3, 3)],
    "long": [(1, 1500), (3, 700)],
}


def attention_by_definition(
    q: Floats, keys: Sequence[Floats], values: Sequence[Floats], heads: Heads, rows: Sequence[tuple[int, int]]
) -> Floats:
    """Reference for every head of every token separately; keys and values of a row are [context, nkv, d]."""
    output: list[Floats] = []
    for (count, context), k, v in zip(rows, keys, values, strict=True):
        for position in range(context - count, context):
            first = 0 if heads.window is None else max(0, position - heads.window + 1)
            per_head = []
            for head in range(heads.num_heads):
                kv_head = head // (heads.num_heads // heads.num_kv_heads)
                scores = k[first : position + 1, kv_head] @ q[len(output), head] * heads.scale
                if heads.softcap is not None:
                    scores = heads.softcap * np.tanh(scores / heads.softcap)
                weights = np.exp(scores - scores.max())
                per_head.append(weights / weights.sum() @ v[first : position + 1, kv_head])
            output.append(np.concatenate(per_head))
    return np.stack(output)


def attend(
    ops: Ops,
    values: Values,
    rows: list[tuple[int, int]],
    kv_dtype: str = "auto",
    offset: float = 0.0,
    first: bool = False,
    needles: Sequence[int] = (),
    **changes: Any,
) -> None:
    """Compare attention over scattered blocks with its definition.

    The scores of every second head, or those with the first key, have an `offset`; it alternates from token to token.
    With `needles`, 16 positions for each row, each head has the value of one of them.
    """
    block_size, q_heads, kv_heads, d = 4, 16 if needles else 6, 2, 8
    width = -(-max(context for _, context in rows) // block_size)
    shuffled = np.random.default_rng(3).permutation(len(rows) * width + 2)
    tables = shuffled[: len(rows) * width].reshape(len(rows), width).astype(np.int32)
    keys = [values(context, kv_heads, d) for _, context in rows]
    contents = [values(context, kv_heads, d) for _, context in rows]
    q = values(sum(count for count, _ in rows), q_heads, d)
    if offset:
        q[..., 0] = 16.0 * ((np.arange(len(q))[:, None] + np.arange(q_heads)) % 2)
        for each in keys:
            each[: 1 if first else None, :, 0] = offset / 4
    if needles:
        q[:] = 8.0 * (np.arange(q_heads)[:, None] % d == np.arange(d))
        for each, own in zip(keys, np.reshape(needles, (len(rows), kv_heads, d)), strict=True):
            each[own, np.arange(kv_heads)[:, None], np.arange(d)] = 64.0
    heads = Heads(q_heads, kv_heads, d, scale=0.25, rope=no_rope(ops), **changes)
    earlier = step_input([(context, context) for _, context in rows], block_size, tables)
    used = -(-np.array([context for _, context in rows]) // block_size)
    # Entries beyond the context are undefined.
    visible = np.where(np.arange(width) < used[:, None], tables, np.int32(2**20))
    step = replace(step_input(rows, block_size, tables), block_tables=visible)
    cache = ops.allocate_kv(KVShape(2, kv_heads, d, block_size=block_size, dtype=kv_dtype), len(rows) * width + 2)
    layer = cache.layer(1)
    _, k, _ = heads_on(ops, np.concatenate(keys))
    _, _, v = heads_on(ops, np.concatenate(contents))
    ops.write_kv(layer, k, v, ops.from_host(earlier.kv_slots))
    found = ops.paged_attention(heads_on(ops, q)[0], layer, heads, on_device(ops, step))
    keys, contents = ([dequantize_kv(quantize_kv(each, kv_dtype)) for each in side] for side in (keys, contents))
    # A score of 128 has 16 bits after the point.
    tolerance = max(TOLERANCE[ops.dtype], 2e-4) if offset else None
    assert_near(ops, found, attention_by_definition(q, keys, contents, heads=heads, rows=rows), tolerance)


def attend_at_all_sizes(ops: Ops, values: Values, rows: list[tuple[int, int]], **changes: Any) -> None:
    """Attend over KV of each dtype, with scores of ordinary size, large ones and low ones.

    Without the peak of its scores, a softmax of large ones overflows, and of low ones divides by 0. So it does with the
    peak of scores that a window hides, or of another head or token. A score that is lower than the number by which a
    pack hides others shows those.
    """
    for kv_dtype in ("auto", *ops.kv_dtypes):
        for offset, first in ((0, False), (128, False), (-128, False), (128, True), (_BELOW_FINITE_MASKS, True)):
            attend(ops, values, rows, kv_dtype=kv_dtype, offset=offset, first=first, **changes)


@pytest.mark.parametrize("tokens", [1, 3])
def test_attention_finds_a_single_key(
    ops: Ops, values: Values, require: Require, envelope: OperatingEnvelope, tokens: int
) -> None:
    """No tolerance hides one that is left out, such as at the edge of a tile, as it does among thousands of equals."""
    require(*REQUIRES)
    for context in (_LONG // 15, _LONG):
        if not envelope.exceeded({"max_model_len": context}):
            edges = {at for power in range(15) for at in (2**power - 1, 2**power) if at < context - tokens}
            others = np.random.default_rng(context).permutation(context - tokens).tolist()
            needles = [*dict.fromkeys((context - tokens, *sorted(edges), *others))][:32]
            attend(ops, values, [(tokens, context), (tokens, context)], needles=needles)


@pytest.mark.parametrize("rows", ROWS)
def test_attention_reads_scattered_blocks(ops: Ops, values: Values, require: Require, rows: str) -> None:
    require("paged_kv")
    attend_at_all_sizes(ops, values, ROWS[rows])


@pytest.mark.parametrize("rows", ROWS)
def test_attention_keeps_to_its_window(ops: Ops, values: Values, require: Require, rows: str) -> None:
    require("paged_kv", "window")
    attend_at_all_sizes(ops, values, ROWS[rows], window=3)


def test_residual_stream_is_one_sum_in_any_read_order(ops: Ops) -> None:
    """A pack may defer a sum to the next norm; it must be added once, also without a norm."""
    oracle = NumpyOps()
    seen = []
    for pack in (oracle, ops):
        layer = LayerOn(pack, Geometry(post_norm=True), [(13, 13)])
        a = activations(pack, Values(3)(layer.tokens, layer.g.heads * layer.g.d))
        results = []
        for norms in range(3):
            stream = pack.project_residual(a, layer.output, activations(pack, layer.x), layer.post_norm)
            results += [np.array(pack.to_host(pack.rms_norm(stream, layer.norm)), np.float32) for _ in range(norms)]
            results.append(np.array(pack.to_host(pack.settle(stream)), np.float32))
            stream = pack.project_residual(a, layer.output, stream)
            results.append(np.array(pack.to_host(pack.settle(stream)), np.float32))
        seen.append(results)
    for found, expected in zip(seen[1], seen[0], strict=True):
        assert_near(ops, ops.from_host(found), expected)


def test_the_formats_of_packed_weights_are_known_ones(ops: Ops) -> None:
    assert {*ops.weight_formats, *ops.table_formats} <= WEIGHT_FORMATS


def test_pack_redefines_what_describes_its_operations(ops: Ops) -> None:
    """A pack that inherits from another one may compute less where it overrides an operation."""
    classes = type(ops).__mro__

    def generation(name: str) -> int:
        return next(index for index, cls in enumerate(classes) if name in vars(cls))

    for attribute, operations in DESCRIBED_BY.items():
        if getattr(ops, attribute) and attribute not in vars(ops):
            newer = [name for name in operations if generation(name) < generation(attribute)]
            assert not newer, f"{classes[generation(newer[0])].__name__} overrides {newer}, but not `{attribute}`"


def test_oversized_cache_is_reported(ops: Ops, values: Values) -> None:
    with pytest.raises(MemoryError):
        ops.allocate_kv(KVShape(64, 64, 256, block_size=64), 2**24)
    attend(ops, values, [(3, 3)])
