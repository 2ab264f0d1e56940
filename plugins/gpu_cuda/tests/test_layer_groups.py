"""Models with windows: graphs read the block tables of each group of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from fd_core.backends.contract import Availability
from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.engine.building.builder import load_engine
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.testing.models.texts import run
from fd_core.types import RequestSpec, SamplingParams
from processor import OnProcessor, Processor

from fd_gpu_cuda.backend import CudaBackend
from fd_gpu_cuda.ops import CudaOps

GROUPS = LayerGroups(1, 2, window=9)


def texts(folder: Path, groups: LayerGroups = GROUPS, **changes: Any) -> dict[str, list[int]]:
    values: dict[str, Any] = {
        "model": str(folder),
        "backend": "gpu_cuda",
        "dtype": "float32",
        "max_num_seqs": 4,
        "block_size": 4,
        "num_kv_blocks": 2000,
        "max_model_len": 100,
        "max_num_batched_tokens": 24,
        "num_threads": 1,
    }
    random, specs = np.random.default_rng(3), []
    for index, length in enumerate(random.integers(1, 60, 5).tolist()):
        params = SamplingParams(temperature=index % 2, seed=index, max_tokens=24)
        prompt = tuple(random.integers(6, 250, length).tolist())
        specs.append(RequestSpec(request_id=f"r{index}", prompt=prompt, params=params))
    engine = load_engine(EngineConfig(**values | changes), folder, progress=lambda *_: None, wake=lambda: None)
    try:
        assert engine.info.groups == groups
        found = run(engine, specs).tokens
        engine.check_integrity()
        return found
    finally:
        engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_blocks": 45},
        {"speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3), "pipeline_depth": 1},
        {"kv_cache_dtype": "int8"},
    ],
    ids=["scarce blocks", "drafts", "8-bit KV"],
)
def test_replayed_decodes_with_windows_keep_their_texts(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaBackend, "probe", staticmethod(lambda: Availability(True, "emulated", emulated=True)))
    devices: list[Processor] = []

    def make(backend: CudaBackend) -> CudaOps:
        ops = OnProcessor.make_ops(backend)  # type: ignore[arg-type]  # which it becomes
        devices.append(backend.processor)  # type: ignore[attr-defined]
        return ops

    monkeypatch.setattr(CudaBackend, "make_ops", make)
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    folder = write_checkpoint("gemma3", tmp_path, num_hidden_layers=3, vocab_size=258, layer_types=layers)
    found = texts(folder, **changes)
    assert devices[0].replays > 20
    monkeypatch.setattr(ContinuousBatchingScheduler, "groups_layers", False)
    assert found == texts(folder, ONE_GROUP, **{"num_kv_blocks": 2000} | changes)
