"""Costs of operations: they grow with what a call reads and writes, not with the arrays that this is a part of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import numpy as np
import pytest

from fd_core.ops.contract import Heads, KVShape, Norm, Ops
from fd_core.testing.axes import sampling
from fd_core.testing.axes.reuse import IN_PLACE, RecordingOps
from fd_core.testing.kit.growth import count_bytes, count_elements, cpu_seconds
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.models.arrays import (
    Values,
    activations,
    heads_on,
    no_rope,
    on_device,
    packed_weight,
    raw,
    step_input,
)
from fd_core.testing.models.layers import Geometry, LayerOn

Require = Callable[..., None]
_WIDE = 4000
"""Blocks for which a table has places, without use."""
_SMALL, _LARGE = 16, 24_000
"""Blocks of pools of which a call uses one block; the larger one has about 100 MB."""
_COUNTS: Final = {"table": (64, 16_384), "packed table": (64, 16_384), "experts": (4, 64)}
"""Rows of a table, and experts, of which a call uses some."""
_TOKENS: Final = 2048
_POOLS = {
    "heads": KVShape(1, 2, 64, block_size=4),
    "latents": KVShape(1, 1, 128, block_size=8, latent=96),
}


def require_as_cheap(calls: Sequence[Callable[[], object]], what: str, spare: int, *, in_place: bool = False) -> None:
    """Compare the memory that two calls take on the host, the elements that torch writes, and their CPU time.

    Compiled code writes what no counter sees. The second call, whose arrays are larger, may take some `spare` bytes and
    elements more. What torch writes `in_place` counts as all of the array.
    """
    for unit, measure in (("bytes", count_bytes), ("elements", count_elements), ("s of CPU time", cpu_seconds)):
        if in_place and unit == "elements":
            continue
        for call in calls:
            call()
        few, many = map(measure, calls)
        most = 6 * few + 5e-3 if unit == "s of CPU time" else 2 * few + spare
        assert many <= most, f"{what}: {many:,} {unit}, where a smaller one costs {few:,}"


def test_cost_of_attention_does_not_grow_with_the_block_table(ops: Ops, values: Values, require: Require) -> None:
    """A table has places for the longest context."""
    require("primitives", "kv_transfer", "paged_kv")
    size, kv_heads, d, rows = 4, 2, 64, [(1, 9), (3, 20), (1, 1)]
    heads = Heads(2 * kv_heads, kv_heads, d, scale=0.25, rope=no_rope(ops))
    layer = ops.allocate_kv(KVShape(1, kv_heads, d, block_size=size), 15).layer(0)
    q = heads_on(ops, values(5, 2 * kv_heads, d))[0]

    def attend(width: int) -> None:
        tables = np.zeros((3, width), np.int32)
        tables[:, :5] = np.arange(15).reshape(3, 5)
        ops.to_host(ops.paged_attention(q, layer, heads, on_device(ops, step_input(rows, size, tables))))

    calls = [partial(attend, width) for width in (5, 5 + _WIDE)]
    require_as_cheap(calls, f"attention with a table of {5 + _WIDE:,} blocks", 64 * len(rows) * _WIDE)


def test_cost_of_logits_grows_with_the_rows_that_need_them(ops: Ops, values: Values, require: Require) -> None:
    """A prompt chunk needs those of its last token, or none; logits of all would take gigabytes."""
    require("primitives")
    hidden, vocabulary, lengths = 64, 16_384, (2, 514)
    head = ops.prepare_linear([raw(values(vocabulary, hidden))])
    norm = Norm(ops.prepare_vector(np.ones(hidden, np.float32)), 1e-5)

    def compute(x: Any, last: Any) -> None:
        ops.to_host(ops.logits(x, norm, head, last))

    given = [(activations(ops, values(n, hidden)), ops.from_host(np.array([n - 1], np.int32))) for n in lengths]
    require_as_cheap(
        [partial(compute, *each) for each in given], f"logits of 1 of {lengths[1]} tokens", 64 * lengths[1] * hidden
    )


@pytest.mark.fd_alone
@pytest.mark.parametrize("weights", ["table", "packed table", "experts"])
def test_cost_of_weights_grows_with_those_that_are_used(
    ops: Ops, values: Values, require: Require, weights: str
) -> None:
    """Look up a row of a table, and route equal tokens to two experts, of few and of many."""
    require("primitives", *["moe"] * (weights == "experts"))
    calls = list[Callable[[], object]]()
    for count in _COUNTS[weights]:
        if weights == "experts":
            layer = LayerOn(ops, Geometry(hidden=64, inner=128, experts=count), [(_TOKENS, _TOKENS)])
            calls.append(partial(_route, layer, activations(ops, values(1, 64).repeat(_TOKENS, axis=0))))
            continue
        packed = weights != "table"
        if packed and not ops.table_formats:
            lacks("it has no packed tables")
        stored = packed_weight(min(ops.table_formats), count, 256, None, 0.1, "usual", 1) if packed else None
        table = ops.prepare_embedding(raw(values(count, 256)) if stored is None else stored)
        ids = ops.from_host(np.array([count - 1], np.int32))
        calls.append(partial(_look_up, ops, table, ids))
    few, many = _COUNTS[weights]
    require_as_cheap(calls, f"{weights} of {many:,} instead of {few}", 2**20, in_place=weights == "experts")


def _route(layer: LayerOn, x: Any) -> None:
    assert layer.experts is not None
    layer.ops.to_host(layer.ops.moe(x, layer.experts, "silu"))


def _look_up(ops: Ops, table: Any, ids: Any) -> None:
    ops.to_host(ops.embedding(table, ids))


@pytest.mark.fd_alone
@pytest.mark.parametrize("call", ["export", "import", "write"])
@pytest.mark.parametrize("kind", _POOLS)
def test_cost_of_a_block_does_not_grow_with_the_pool(ops: Ops, require: Require, kind: str, call: str) -> None:
    require("kv_transfer", *["latents"] * (kind == "latents"), *["primitives"] * (call == "write"))
    calls, shape = list[Callable[[], object]](), _POOLS[kind]
    for count in (_SMALL, _LARGE):
        cache, some = ops.allocate_kv(shape, count), np.array([count - 2], np.int32)
        if call == "write":
            sizes = (shape.head_dim - shape.latent, shape.latent) if shape.latent else 2 * (shape.head_dim,)
            k, v = (heads_on(ops, np.ones((1, shape.num_kv_heads, size), np.float32))[1] for size in sizes)
            calls.append(partial(ops.write_kv, cache.layer(0), k, v, ops.from_host(some * np.int32(shape.block_size))))
        elif call == "export":
            calls.append(partial(cache.export_blocks, some))
        else:
            calls.append(partial(cache.import_blocks, some, cache.export_blocks(some)))
    require_as_cheap(calls, f"{call} of a block of {_LARGE:,}", 2**18, in_place=call != "export")


@pytest.mark.parametrize("operation", IN_PLACE)
def test_memory_of_a_change_does_not_grow_with_the_array(ops: Ops, operation: str) -> None:
    """Change rows of an array that has 1, 4 and 16 times as many: those of a few of all slots.

    A copy of counts of the vocabulary for each slot takes longer than the rest of a step.
    """
    recorded = RecordingOps(ops, operation)
    for part in sampling.PARTS:
        part.check(cast(Ops, recorded), part.case("").values)
    assert recorded.calls, f"no plain case calls {operation}"
    for given in recorded.calls[:2]:
        array, name = np.array(ops.to_host(given[IN_PLACE[operation]])), IN_PLACE[operation]
        taken = []
        for times in (1, 4, 16):
            large = ops.from_host(np.concatenate([array] * times))
            taken.append(count_bytes(partial(getattr(ops, operation), **{**given, name: large})))
        more, grown = taken[-1] - taken[0], 15 * array.nbytes
        assert more < grown // 4, (
            f"{operation} takes {more:,} bytes more for an array of {grown:,} bytes more, of which it changes the same "
            f"rows: {taken} bytes for {array.nbytes:,}, 4 and 16 times as many; write into `{name}`"
        )
