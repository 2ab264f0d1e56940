"""Models whose heads share one latent vector per token: the small KV keeps every promise about texts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from fd_core.models.families.latent.deepseek import DeepSeekV2
from fd_core.ops.contract import KVShape
from fd_core.testing.models.checkpoints import SIZES, write_config
from fd_core.testing.models.texts import run
from tests.engine.building.test_kv_transfer import Pair
from tests.engine.helpers import random_specs
from tests.engine.test_layer_groups import PACKS, engine_of, run_preempted
from tests.engine.ways import WAYS

SPECS: Final = random_specs(5, seed=3, max_prompt=60, max_tokens=25)
LATENT, ROTATED, LAYERS = 24, 8, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent") / "model"
    named = {"architectures": list(DeepSeekV2.architectures), "torch_dtype": "float32", "vocab_size": 258}
    write_config({**SIZES, **DeepSeekV2.defaults, **DeepSeekV2.cases["yarn"], **named}, folder, seed=4)
    return folder


@cache
def golden(folder: Path, *changes: tuple[str, Any]) -> dict[str, list[int]]:
    """Return the texts of an engine whose memory suffices."""
    with engine_of(folder, **dict(changes)) as engine:
        return run(engine, SPECS).tokens


@pytest.mark.parametrize("way", {**PACKS, **WAYS})
@pytest.mark.law("4")
@pytest.mark.in_turn(3)
def test_settings_do_not_change_texts(model: Path, way: str) -> None:
    changes = WAYS.get(way) or {**PACKS[way], "num_kv_blocks": 45}
    with engine_of(model, **{"dtype": "float32", **changes}) as engine:
        for _ in range(2):  # from the cache of prefixes, too
            assert run(engine, SPECS).tokens == golden(model)
        assert (engine.stats().scheduler.blocks.used, engine.stats().scheduler.blocks.fenced) == (0, 0)
        engine.check_integrity()


@pytest.mark.law("5.2")
@pytest.mark.parametrize("pack", ["cpu", "cpu, torch"])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_preempted_requests_go_on_from_saved_latent_kv(
    model: Path, pack: str, kv: str, secrets: dict[str, str], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**PACKS[pack], "dtype": "float32", "kv_cache_dtype": kv}
    store = {"kv_store": f"disk:{tmp_path}/kv", "host_kv_memory": 0, **secrets}
    with engine_of(model, num_kv_blocks=41, max_num_seqs=5, **store, **settings) as engine:
        texts = run_preempted(engine, SPECS)
        counters, offload = engine.stats().scheduler.counters, engine.stats().scheduler.offload
        assert counters.preemptions and offload.loaded_tokens
        if kv == "auto":  # 8 bits show rounding errors of sums in another order
            assert texts.tokens == golden(model)
        engine.check_integrity()


@pytest.mark.law("6.2")
def test_pair_transfers_latent_kv(model: Path, secrets: dict[str, str]) -> None:
    with (
        engine_of(model, role="prefill", **secrets) as prefill,
        engine_of(model, role="decode", **secrets) as decode,
    ):
        pair = Pair(prefill, decode)
        pair.run(*SPECS)
        assert pair.texts.tokens == golden(model)
        assert "transferred" in pair.outcomes.values()


def test_engine_reports_the_bytes_of_latent_vectors(model: Path) -> None:
    """DeepSeek's vectors have 512 and 64 elements: 1,152 bytes in bfloat16."""
    assert KVShape(1, 1, 576, block_size=64, latent=512).bytes_per_block(2) == 64 * 1152
    with engine_of(model, num_kv_blocks=100) as engine:
        assert engine.info.kv_cache_bytes == 100 * 4 * LAYERS * (LATENT + ROTATED) * 4
