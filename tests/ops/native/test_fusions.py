"""Guarantees of native fusions beyond the kit: bitwise equal results alone and in a batch."""

from dataclasses import replace

import numpy as np
import pytest

from fd_core.ops.contract import Ops
from fd_core.runner.inputs.inputs import adapter_rows
from fd_core.testing.models.arrays import Values, raw
from fd_core.testing.suite import test_attention
from tests.ops.native.layers import Geometry, LayerOn
from tests.ops.test_fusions import GEOMETRIES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_over_8_bits_with_a_window_and_a_softcap(native, dtype):
    for rows in test_attention.ROWS.values():
        test_attention.attend(native(dtype), Values(12), rows, kv_dtype="int8", window=3, softcap=0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_primitives_serve_the_composition(native, dtype):
    """Inherited compositions of the native pack work with its overrides."""
    ops, geometry = native(dtype), GEOMETRIES["shared experts"][0]
    tolerance = 2e-5 if dtype == "float32" else 4e-2
    for fused, composed in zip(LayerOn(ops, geometry).run(ops), LayerOn(ops, geometry).run(Ops), strict=True):
        np.testing.assert_allclose(fused, composed, rtol=0, atol=tolerance * np.abs(composed).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_product_row_is_bitwise_equal_in_any_batch(native, dtype):
    """Many rows are multiplied in another type, and long ones in parts, but in the same order."""
    ops, values = native(dtype, 2), Values(8)
    weight = ops.prepare_linear([raw(values(100, 1101))])
    x = ops.from_host(values(71, 1101))
    together = ops.to_host(ops.linear(x, weight)).copy()
    for count in (1, 5, 23, 24, 40):
        pieces = [ops.to_host(ops.linear(x[i : i + count], weight)) for i in range(0, 71, count)]
        np.testing.assert_array_equal(np.concatenate(pieces), together)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_rows_sharing_a_prefix_are_bitwise_equal_to_alone(native, dtype, threads, kv_dtype):
    """Multi-row tiles change the work split, but no bit of the result."""
    ops = native(dtype, threads)
    geometry = replace(GEOMETRIES["smollm2"][0], kv_dtype=kv_dtype, shared_blocks=8)
    contexts = [257, 300, 411, 290, 384, 385, 300, 512, 260, 333, 401, 499]
    layer = LayerOn(ops, geometry, [(1, context) for context in contexts])
    q = np.random.default_rng(3).standard_normal((len(contexts), 9, 64)).astype(np.float32)
    together = ops.to_host(ops.attention(ops.from_host(q), layer.heads, layer.kv, layer.step)).copy()
    for row, context in enumerate(contexts):
        step = layer.step
        alone = type(step)(
            token_ids=step.token_ids[row : row + 1],
            positions=step.positions[row : row + 1],
            kv_slots=step.kv_slots[row : row + 1],
            query_start=step.query_start[:2],
            context_len=step.context_len[row : row + 1],
            block_tables=step.block_tables[row : row + 1],
            logits_rows=step.logits_rows[:1],
            max_query=1,
            max_context=context,
        )
        single = ops.to_host(ops.attention(ops.from_host(q[row : row + 1]), layer.heads, layer.kv, alone))
        np.testing.assert_array_equal(single[0], together[row])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [None, "Q4_1"])
def test_adapter_row_is_bitwise_equal_alone_and_in_batch(native, dtype, packed):
    """Also next to rows of other adapters and of none; the latter equal a step without adapters."""
    geometry = Geometry(
        heads=9, kv_heads=3, d=64, hidden=96, inner=160, block_size=32, packed=packed, adapter_ranks=(5, 8)
    )
    rows = [(1, count) for count in range(1, 60)]
    ops = native(dtype, 2)
    together = LayerOn(ops, geometry, rows)
    found = together.run(ops)
    plain = LayerOn(ops, replace(geometry, adapter_ranks=()), rows).run(ops)
    for row in (0, 3, 7, 31, 58):
        alone = LayerOn(ops, geometry, rows)
        index = np.full(1, row)
        alone.x = together.x[index]
        step = alone.step
        alone.step = replace(
            step,
            **{name: getattr(step, name)[row : row + 1] for name in ("token_ids", "positions", "kv_slots")},
            query_start=step.query_start[:2],
            context_len=step.context_len[row : row + 1],
            block_tables=step.block_tables[row : row + 1],
            **adapter_rows(together.places[index], ops),
        )
        for ours, theirs in zip(alone.run(ops), found, strict=True):
            np.testing.assert_array_equal(ours[0], theirs[row])
        same = all((theirs[row] == without[row]).all() for theirs, without in zip(found, plain, strict=True))
        assert same == (together.places[row] == 0)
