"""KV in 8 bits: stored as specified, bit for bit, with the same texts as the oracle with 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fd_core.ops.contract import KVShape, Ops
from fd_core.ops.numpy.kv_int8 import quantize_kv
from fd_core.testing.kit.judging import Golden
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.kit.target import Target
from fd_core.testing.models.arrays import Values, assert_same, assert_within
from fd_core.testing.models.layers import Geometry, LayerOn
from fd_core.testing.suite import test_fusions, test_golden, test_operations
from fd_core.testing.suite.kv import test_kv

REQUIRES = ("kv_transfer",)

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=10, block_size=5, dtype="int8")
GEOMETRIES = {
    "plain": Geometry(kv_dtype="int8"),
    "smollm2": Geometry(heads=9, kv_heads=3, d=64, hidden=96, block_size=32, kv_dtype="int8"),
    "odd sizes": Geometry(heads=3, kv_heads=3, d=10, hidden=38, inner=50, block_size=5, kv_dtype="int8"),
}


@pytest.fixture
def ops8(ops: Ops) -> Ops:
    """Return the pack; skip the test if it stores KV only in its own dtype."""
    if "int8" not in ops.kv_dtypes:
        lacks("its pack stores KV only in its own dtype")
    return ops


@pytest.fixture
def narrow(target: Target, ops8: Ops) -> Target:
    """The same backend with KV in 8 bits."""
    return target.quantized()


def test_quantized_blocks_are_restored_bit_for_bit(ops8: Ops) -> None:
    cache = ops8.allocate_kv(SHAPE, 7)
    data = np.random.default_rng(0).integers(-128, 128, (3, 2, 2, 5, 3, 14)).astype(np.int8)  # any scale, including NaN
    data.flags.writeable = False
    cache.import_blocks(np.array([6, 0, 3], np.int32), data)
    assert_same(cache.export_blocks(np.array([6, 0, 3], np.int32)).view(np.uint8), data.view(np.uint8))
    assert_same(cache.export_blocks(np.array([3], np.int32)).view(np.uint8), data[2:].view(np.uint8))


@pytest.mark.parametrize("tokens", [1, 9], ids=["one by one", "at once"])
def test_stored_kv_equals_the_oracles(ops8: Ops, require: Callable[..., None], tokens: int) -> None:
    """Quantize also heads of zeros, with one large element, and with values so small that the scale underflows."""
    require("primitives")
    cache, slots = ops8.allocate_kv(SHAPE, 7), np.array([0, 1, 2, 3, 4, 30, 31, 15, 16], np.int32)
    x = Values(5)(9, 3, 10)
    x[0, 1], x[1, 0, 3], x[2, 2] = 0.0, 1000.0, 2.0**-24 if ops8.dtype == "float16" else 2.0**-133
    for start in range(0, 9, tokens):
        _, k, _ = test_operations.heads_of(ops8, x[start : start + tokens])
        _, _, v = test_operations.heads_of(ops8, -x[start : start + tokens])
        ops8.write_kv(cache.layer(1), k, v, ops8.from_host(slots[start : start + tokens]))
    exported = cache.export_blocks(np.arange(7, dtype=np.int32))
    for side, right in enumerate((quantize_kv(x), quantize_kv(-x))):
        assert_same(exported[slots // 5, 1, side, slots % 5], right)


@pytest.mark.parametrize("rows", test_operations.ROWS)
def test_attention_reads_what_is_kept(ops8: Ops, require: Callable[..., None], rows: str) -> None:
    require("primitives", "paged_kv")
    test_operations.attend(ops8, Values(11), test_operations.ROWS[rows], kv_dtype="int8")


@pytest.mark.parametrize("name", GEOMETRIES)
def test_fusions_keep_and_read_what_their_composition_does(ops8: Ops, require: Callable[..., None], name: str) -> None:
    """Tolerate a difference of one step in elements that another order of summation rounds differently."""
    require("primitives")
    fused, composed = (LayerOn(ops8, GEOMETRIES[name]) for _ in range(2))
    ours, right = fused.run(ops8), composed.run(Ops)
    for found, expected in zip(ours[:2], right[:2], strict=True):  # queries and attention
        assert_within(found, expected, atol=0.02 * np.abs(expected).max())
    blocks = np.arange(fused.cache.num_blocks, dtype=np.int32)
    kept, theirs = (layer.cache.export_blocks(blocks)[..., : fused.g.d].astype(int) for layer in (fused, composed))
    assert np.abs(kept - theirs).max() <= 1
    assert (kept != theirs).mean() < (0.01 if ops8.dtype == "float32" else 0.1)


def test_a_scale_that_a_block_held_before_does_not_matter(ops8: Ops, require: Callable[..., None]) -> None:
    """A NaN scale must not reach the next owner of its block."""
    require("primitives")
    test_fusions.test_earlier_block_content_does_not_matter(ops8, GEOMETRIES["plain"])


@pytest.mark.law("4")
def test_batching_and_chunking_change_no_text(narrow: Target) -> None:
    test_golden.test_batching_changes_no_text(narrow, Golden(narrow), 8)
    test_golden.test_chunking_changes_no_text(narrow, Golden(narrow), 7)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "recomputed"])
@pytest.mark.law("4")
def test_preemption_changes_no_text(narrow: Target, keep: bool) -> None:
    test_golden.test_preemption_changes_no_text(narrow, Golden(narrow), keep, depth=2)


@pytest.mark.law("4")
def test_speculation_changes_no_text(narrow: Target) -> None:
    test_golden.test_speculation_changes_no_text(narrow, Golden(narrow), 3, wrong=0.3)


def test_kv_that_left_the_device_serves_as_well_as_computed(narrow: Target) -> None:
    test_kv.test_an_engine_goes_on_from_imported_blocks(narrow, Golden(narrow))
    test_kv.test_texts_survive_a_preemption_whose_kv_is_restored(narrow, Golden(narrow), 2)


def test_the_engine_keeps_what_it_was_asked_for(narrow: Target) -> None:
    with narrow.engine() as engine:
        cache = engine.probe().runner.cache
        assert cache.shape.quantized and cache.export_blocks(np.zeros(1, np.int32)).dtype == np.int8
        assert engine.info.kv_dtype == "int8"
