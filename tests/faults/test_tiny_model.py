"""A real, tiny model on the reference backend: damaged floating-point KV in a store does not change texts either."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.types import RequestSpec, SamplingParams
from tests.engine.helpers import run
from tests.faults.pressed import until
from tests.faults.raw_stores import RawStore
from tests.models.tiny import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("llama")).folder


def reference(model: Path, **settings: object) -> Engine:
    values: dict[str, object] = {
        "model": str(model),
        "backend": "reference",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "num_kv_blocks": 200,
        "max_model_len": 96,
    }
    return load_engine(EngineConfig(**(values | settings)), model, progress=lambda *_: None)  # type: ignore[arg-type]


def specs() -> list[RequestSpec]:
    rng = np.random.default_rng(4)
    return [
        RequestSpec(
            request_id=f"r{index}",
            prompt=tuple(rng.integers(0, 160, int(rng.integers(3, 50))).tolist()),
            params=SamplingParams(max_tokens=24, temperature=float(index % 2), seed=index, ignore_eos=True),
        )
        for index in range(8)
    ]


@pytest.mark.parametrize("compression", ["none", "zlib"])
def test_texts_of_a_real_model_survive_damaged_values(
    model: Path, raw_store: RawStore, secret: Path, compression: str
) -> None:
    expected = run(reference(model, save_preempted_kv=False), specs()).tokens
    for number in range(3):
        engine = reference(
            model,
            num_kv_blocks=26,
            host_kv_memory=0,
            kv_store=raw_store.location,
            kv_store_secret_file=str(secret),
            kv_store_compression=compression,
        )
        engine.probe().scheduler.probe().control.growth = lambda *_: 0  # type: ignore[method-assign]  # no admission control
        engine._prefill_pace.observe = lambda *_: None  # type: ignore[method-assign]  # loads whatever it can
        assert run(engine, specs()).tokens == expected
        until(lambda engine=engine: not engine.stats().kv.pending_write_bytes, 5.0)  # type: ignore[union-attr]
        stats = engine.stats().kv
        assert stats is not None
        assert engine.stats().scheduler.counters.preemptions > 0
        assert not number or stats.loaded_blocks_store > 0
        assert bool(stats.damaged) == (number == 2)
        engine.close()
        if number == 1:
            for key, value in list(raw_store.values().items())[::3]:
                raw_store.access.write(key, value[:-1] + bytes([value[-1] ^ 1]))
