"""Each fusion of the native pack against the numpy oracle's composition, for geometries that models have."""

import numpy as np
import pytest

from fd_core.ops.contract import Ops
from fd_core.ops.numpy_ops import NumpyOps
from tests.ops.native.layers import Geometry, LayerOn

GEOMETRIES = {
    "plain": Geometry(),
    "smollm2": Geometry(heads=9, kv_heads=3, d=64, hidden=96, block_size=32),
    "wide heads": Geometry(heads=2, kv_heads=1, d=256, block_size=16),
    "odd sizes": Geometry(heads=3, kv_heads=3, d=10, hidden=38, inner=50, block_size=5),
    "d80": Geometry(heads=4, kv_heads=4, d=80, rotary=32, block_size=16),
    "d96 many queries": Geometry(heads=24, kv_heads=1, d=96, block_size=64),
    "more queries than a tile": Geometry(heads=64, kv_heads=1, d=8, block_size=128),
    "interleaved biases": Geometry(interleaved=True, biases=True, d=128),
    "gemma": Geometry(window=21, softcap=5.0, head_norms=True, post_norm=True, activation="gelu_tanh"),
    "window over chunks": Geometry(window=130, block_size=32, activation="gelu"),
    "experts": Geometry(experts=5),
    "shared experts": Geometry(experts=7, shared_expert=True, correction_bias=True, inner=24),
}
OTHER_SETS = ["avx512", "avx2", "generic", "amx_emulated"]


def compare(ops, geometry):
    expected = LayerOn(NumpyOps(), geometry).run(Ops)
    # bfloat16 rounds queries, weights of the sum and inner activations: each by 1 part in 256.
    tolerance = 2e-5 if ops.dtype == "float32" else 4e-2
    for ours, theirs in zip(LayerOn(ops, geometry).run(ops), expected, strict=True):
        scale = np.abs(theirs).max()
        assert np.abs(ours.reshape(theirs.shape) - theirs).max() < tolerance * scale
        assert np.abs(ours.reshape(theirs.shape) - theirs).mean() < tolerance / 8 * scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_fusions_equal_their_composition(native, name, dtype):
    compare(native(dtype), GEOMETRIES[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", OTHER_SETS)
@pytest.mark.parametrize("name", ["smollm2", "odd sizes", "d80", "gemma", "shared experts"])
def test_every_instruction_set_computes_the_same(native, name, isa, dtype):
    compare(native(dtype, isa=isa), GEOMETRIES[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_primitives_serve_the_composition(native, dtype):
    """What the native pack inherits fits what it overrides."""
    ops, geometry = native(dtype), GEOMETRIES["shared experts"]
    tolerance = 2e-5 if dtype == "float32" else 4e-2
    for fused, composed in zip(LayerOn(ops, geometry).run(ops), LayerOn(ops, geometry).run(Ops), strict=True):
        np.testing.assert_allclose(fused, composed, rtol=0, atol=tolerance * np.abs(composed).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_that_share_a_prefix_are_computed_as_if_alone(native, dtype, threads):
    """Tiles of many rows change who computes what, not a bit of the result."""
    ops = native(dtype, threads)
    geometry = GEOMETRIES["smollm2"]
    contexts = [257, 300, 411, 290, 384, 385, 300, 512, 260, 333, 401, 499]
    layer = LayerOn(ops, geometry, [(1, context) for context in contexts], shared_blocks=8)
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
            block_tables=step.block_tables[row : row + 1].contiguous(),
            logits_rows=step.logits_rows[:1],
            max_query=1,
            max_context=context,
        )
        single = ops.to_host(ops.attention(ops.from_host(q[row : row + 1]), layer.heads, layer.kv, alone))
        np.testing.assert_array_equal(single[0], together[row])


def test_values_that_a_block_held_before_do_not_matter(native):
    """A NaN that a finished request left behind must not reach the next owner of its block."""
    ops, geometry = native("float32"), GEOMETRIES["plain"]
    clean = LayerOn(ops, geometry, [(13, 13)])
    dirty = LayerOn(ops, geometry, [(13, 13)])
    blocks = np.arange(dirty.cache.num_blocks, dtype=np.int32)
    dirty.cache.import_blocks(blocks, np.full_like(dirty.cache.export_blocks(blocks), np.nan))
    for ours, theirs in zip(dirty.run(ops), clean.run(ops), strict=True):
        np.testing.assert_array_equal(ours, theirs)
