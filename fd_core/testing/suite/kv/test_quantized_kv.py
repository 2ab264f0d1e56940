"""KV in 8 bits, as configured, exported and imported bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.ops.contract import KV_TYPES, Ops
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.kit.target import Target

REQUIRES = ("kv_transfer",)


@pytest.fixture(params=KV_TYPES)
def kv_dtype(ops: Ops, request: pytest.FixtureRequest) -> str:
    """Return a dtype of 8 bits; skip the test if the pack does not store KV in it."""
    dtype: str = request.param
    if dtype not in ops.kv_dtypes:
        lacks(f"its pack stores no KV in {dtype}")
    return dtype


def test_the_engine_keeps_what_it_was_asked_for(target: Target, kv_dtype: str) -> None:
    with target.changed(kv_cache_dtype=kv_dtype).engine() as engine:
        cache = engine.probe().runner.cache
        assert cache.shape.dtype == engine.info.kv_dtype == kv_dtype
        assert cache.export_blocks(np.zeros(1, np.int32)).dtype == KV_TYPES[kv_dtype]
