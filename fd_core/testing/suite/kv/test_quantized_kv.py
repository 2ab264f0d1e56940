"""KV in 8 bits, as configured, exported and imported bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.ops.contract import KVShape, Ops
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.kit.target import Target
from fd_core.testing.suite.kv import test_kv

REQUIRES = ("kv_transfer",)

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=10, block_size=5, dtype="int8")


@pytest.fixture
def ops8(ops: Ops) -> Ops:
    """Return the pack; skip the test if it stores KV only in its own dtype."""
    if "int8" not in ops.kv_dtypes:
        lacks("its pack stores KV only in its own dtype")
    return ops


@pytest.fixture
def narrow(target: Target, ops8: Ops) -> Target:
    """The same backend with KV in 8 bits."""
    return target.changed(kv_cache_dtype="int8")


def test_quantized_blocks_are_restored_bit_for_bit(ops8: Ops) -> None:
    cache = ops8.allocate_kv(SHAPE, 7)
    data = np.random.default_rng(0).integers(-128, 128, (3, 4, 2, 5, 6, 14)).astype(np.int8)  # any scale, including NaN
    test_kv.check_restored(cache, data)


def test_the_engine_keeps_what_it_was_asked_for(narrow: Target) -> None:
    with narrow.engine() as engine:
        cache = engine.probe().runner.cache
        assert cache.shape.quantized and cache.export_blocks(np.zeros(1, np.int32)).dtype == np.int8
        assert engine.info.kv_dtype == "int8"
