"""Real checkpoints draft for each other on every pack: equal texts, full acceptance for a model drafting for itself."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.engine.llm import LLM
from fd_core.errors import ConfigError, ModelError
from fd_core.models.catalog import resolve_model
from fd_core.ops.native import load_native_ops
from fd_core.types import RequestSpec, SamplingParams
from tests.engine.helpers import Texts, run
from tests.models.test_smollm2 import network_is_there

pytestmark = pytest.mark.slow

PACKS = {
    "numpy": {"backend": "reference"},
    "torch": {"backend": "cpu", "dtype": "float32", "native_kernels": False},
    "native": {"backend": "cpu", "dtype": "float32"},
    "paddle": {"backend": "cpu+paddle"},
}


def engine(target: Path, draft: Path | None, pack: str, k: int = 3, **settings: object) -> Engine:
    if pack == "native" and load_native_ops("float32", 1) is None:
        pytest.skip("native kernels cannot be built here")
    if pack == "paddle" and find_spec("paddle") is None:
        pytest.skip("Paddle is not installed; `nox -s paddle` tests its pack")
    values: dict[str, object] = {
        "model": str(target),
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "num_kv_blocks": 200,
        "max_model_len": 96,
        "num_threads": 1,
        **PACKS[pack],
        **settings,
    }
    if draft is not None:
        values["speculative"] = SpeculativeConfig(
            method="draft_model", model=str(draft), num_speculative_tokens=k, cheap_tokens=1000
        )
    return load_engine(EngineConfig(**values), target, progress=lambda *_: None)  # type: ignore[arg-type]


def specs(temperature: float = 0.0) -> list[RequestSpec]:
    rng = np.random.default_rng(4)
    return [
        RequestSpec(
            request_id=f"r{index}",
            prompt=tuple(rng.integers(0, 160, int(rng.integers(3, 50))).tolist()),
            params=SamplingParams(max_tokens=24, temperature=temperature * (index % 2), seed=index, ignore_eos=True),
        )
        for index in range(6)
    ]


def texts(loaded: Engine, requests: list[RequestSpec], *, eager: bool = False) -> Texts:
    if eager:
        loaded._scheduler.probe().control.growth = lambda *_: 0  # type: ignore[method-assign]  # override: admit all
    return run(loaded, requests)


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.soak), 3, pytest.param(5, marks=pytest.mark.soak)])
@pytest.mark.parametrize("pack", PACKS)
def test_drafts_of_another_architecture_change_no_text(tiny, pack: str, k: int) -> None:
    requests = specs(temperature=1.0)
    plain = texts(engine(tiny("llama").folder, None, pack), requests)
    pressed = engine(tiny("llama").folder, tiny("qwen2").folder, pack, k, num_kv_blocks=26)
    assert texts(pressed, requests, eager=True).tokens == plain.tokens
    stats = pressed.stats()
    assert stats.scheduler.counters.preemptions > 0
    assert stats.scheduler.drafts.proposed > stats.scheduler.drafts.accepted


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("pack", PACKS)
def test_model_drafting_for_itself_has_full_acceptance(tiny, pack: str, k: int) -> None:
    folder = tiny("mistral-window").folder
    drafting = engine(folder, folder, pack, k)
    assert texts(drafting, specs()).tokens == texts(engine(folder, None, pack), specs()).tokens
    stats = drafting.stats()
    assert stats.scheduler.drafts.accepted == stats.scheduler.drafts.proposed > 0


def test_error_of_draft_model_names_the_draft_model(tiny, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="draft model: ") as caught:
        engine(tiny("llama").folder, tmp_path, "numpy")
    assert caught.value.field == "--speculative-config"


def changed(folder: Path, copy: Path, **changes: int) -> Path:
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return copy


def test_draft_model_with_shorter_context_drafts_up_to_it(tiny, tmp_path: Path) -> None:
    folder = tiny("llama").folder
    short = changed(folder, tmp_path / "short", max_position_embeddings=40)
    with pytest.raises(ConfigError, match=r"draft model: max_model_len=96 exceeds the model's context \(40 tokens"):
        engine(folder, short, "numpy")
    drafting = engine(folder, short, "numpy", max_model_len=None)
    assert texts(drafting, specs()).tokens == texts(engine(folder, None, "numpy"), specs()).tokens
    assert drafting.stats().scheduler.drafts.accepted > 0


@pytest.fixture(scope="module")
def smollm2() -> str:
    try:
        return str(resolve_model("smollm2").path)
    except ModelError as error:
        if network_is_there():
            raise
        pytest.skip(f"no network: {error}")


@pytest.mark.soak
def test_named_model_drafts_for_itself(smollm2: str) -> None:
    settings = {"max_model_len": 128, "max_num_seqs": 2, "backend": "cpu", "dtype": "float32", "num_threads": 2}
    greedy = SamplingParams(max_tokens=12, temperature=0)
    prompts = ["The capital of France is", "One, two, three,"]
    plain = LLM(smollm2, **settings)
    expected = [result.token_ids for result in plain.generate(prompts, greedy)]
    plain.close()
    drafting = LLM(smollm2, speculative={"method": "draft_model", "model": "smollm2"}, **settings)
    assert [result.token_ids for result in drafting.generate(prompts, greedy)] == expected
    stats = drafting.stats
    assert stats.scheduler.drafts.accepted == stats.scheduler.drafts.proposed > 0
    drafting.close()
    with pytest.raises(ModelError, match="draft model: no such model: 'smollm3'"):
        LLM(smollm2, speculative={"method": "draft_model", "model": "smollm3"}, **settings)
