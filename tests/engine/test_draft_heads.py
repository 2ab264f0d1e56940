"""Drafts from hidden states: the KV of the head keeps every promise about texts that the target's KV keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from fd_core.config import SpeculativeConfig
from fd_core.engine import computing
from fd_core.engine.core import Engine
from fd_core.runner.drafting.eagle import EagleDrafter
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.testing.models.drafting import write_head
from fd_core.testing.models.texts import greedy, run
from fd_core.text.tokenizer import byte_tokenizer
from tests.engine.building.test_kv_transfer import Pair
from tests.engine.helpers import random_specs
from tests.engine.structured import structured_specs
from tests.engine.test_layer_groups import PACKS, engine_of, run_preempted
from tests.models.mtp import write_mtp_model

SPECS: Final = random_specs(5, seed=3, max_prompt=60, max_tokens=25)
Settings = dict[str, Any]


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(method: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headed")
    if method == "mtp":
        return write_mtp_model("deepseek", folder, vocab_size=258)
    return write_checkpoint("llama", folder / "model", vocab_size=258)


@pytest.fixture(scope="module")
def drafting(method: str, model: Path) -> Settings:
    """Settings of an engine with a head, which is random, so almost none of its drafts are accepted."""
    head = None if method == "mtp" else str(write_head(model, model.parent / "head", drafts=200))
    return {"speculative": SpeculativeConfig(method=method, model=head, cheap_tokens=1000)}


@cache
def golden(folder: Path) -> dict[str, list[int]]:
    with engine_of(folder) as engine:
        return run(engine, SPECS).tokens


@pytest.fixture
def knowing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace most drafts by the right ones, after the head has written its KV."""
    known = [[*spec.prompt, *golden(model)[spec.request_id]] for spec in SPECS]
    propose: Callable[..., Any] = EagleDrafter.propose
    rng = np.random.default_rng(0)

    def informed(self: EagleDrafter, slots: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, counts = propose(self, slots, limit)
        for row, (slot, length) in enumerate(zip(slots, self._given.lengths[self._row_of[slots]], strict=True)):
            text = self._given.tokens[slot, :length].tolist()
            rest = next((each[length : length + limit] for each in known if each[:length] == text), [])
            counts[row] = rng.integers(0, len(rest) + 1)
            tokens[row, : len(rest)] = rest
        tokens[rng.random(tokens.shape) < 0.2] = 0
        return tokens, counts

    monkeypatch.setattr(EagleDrafter, "propose", informed)


def require_accepted(engine: Engine) -> None:
    drafts = engine.stats().scheduler.drafts
    assert drafts.proposed > drafts.accepted > drafts.proposed / 5
    assert (engine.stats().scheduler.blocks.used, engine.stats().scheduler.blocks.fenced) == (0, 0)
    engine.check_integrity()


@pytest.mark.usefixtures("knowing")
@pytest.mark.parametrize(
    "changes",
    [
        *({**settings, "num_kv_blocks": 45} for settings in PACKS.values()),
        {"max_num_batched_tokens": 5, "pipeline_depth": 1, "backend": "cpu"},
        {"enable_prefix_caching": False, "num_kv_blocks": 60, "block_size": 3},
    ],
    ids=[*PACKS, "small budget", "no prefix cache"],
)
@pytest.mark.law("4")
@pytest.mark.in_turn(2)
def test_settings_do_not_change_texts(model: Path, drafting: Settings, changes: Settings) -> None:
    with engine_of(model, **{"dtype": "float32", **drafting, **changes}) as engine:
        for _ in range(2):  # from the cache of prefixes, too
            assert run(engine, SPECS).tokens == golden(model)
        require_accepted(engine)


def test_ranks_change_neither_drafts_nor_texts(
    model: Path, drafting: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[dict[tuple[int, ...], list[int]]] = []
    propose: Callable[..., Any] = EagleDrafter.propose

    def recorded(self: EagleDrafter, slots: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, counts = propose(self, slots, limit)
        lengths = self._given.lengths[self._row_of[slots]]
        for slot, length, row, count in zip(slots, lengths, tokens, counts, strict=True):
            drafts[-1][tuple(self._given.tokens[slot, :length].tolist())] = row[:count].tolist()
        return tokens, counts

    monkeypatch.setattr(EagleDrafter, "propose", recorded)
    spec, texts = greedy("r", range(20), 12), []
    for ranks in (1, 2):
        drafts.append({})
        with engine_of(model, tensor_parallel_size=ranks, backend="cpu", dtype="float32", **drafting) as engine:
            drafts[-1].clear()  # those of the warm-up
            texts.append(run(engine, [spec]).tokens)
    assert texts[0] == texts[1]
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) > 3


@pytest.mark.usefixtures("knowing")
@pytest.mark.law("5.2")
def test_preempted_requests_go_on_from_saved_kv_of_the_head(
    model: Path, drafting: Settings, secrets: dict[str, str], tmp_path: Path
) -> None:
    store = {"kv_store": f"disk:{tmp_path}/kv", "host_kv_memory": 0, **secrets}
    with engine_of(model, num_kv_blocks=41, max_num_seqs=5, **store, **drafting) as engine:
        texts = run_preempted(engine, SPECS)
        counters, offload = engine.stats().scheduler.counters, engine.stats().scheduler.offload
        assert counters.preemptions and offload.loaded_tokens
        assert texts.tokens == golden(model)
        require_accepted(engine)


@pytest.mark.usefixtures("knowing")
@pytest.mark.law("6.2")
def test_pair_transfers_kv_of_the_head(model: Path, drafting: Settings, secrets: dict[str, str]) -> None:
    with (
        engine_of(model, role="prefill", **secrets, **drafting) as prefill,
        engine_of(model, role="decode", **secrets, **drafting) as decode,
    ):
        pair = Pair(prefill, decode)
        pair.run(*SPECS)
        assert pair.texts.tokens == golden(model)
        assert "transferred" in pair.outcomes.values()
        require_accepted(decode)


@pytest.mark.law("4")
def test_forced_and_drafted_tokens_change_no_grammar(
    model: Path, drafting: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "_tokenizer", lambda _: byte_tokenizer())
    specs = structured_specs(6, max_tokens=30)
    with engine_of(model) as plain, engine_of(model, num_kv_blocks=50, **drafting) as engine:
        assert run(engine, specs).tokens == run(plain, specs).tokens
        assert engine.stats().scheduler.drafts.proposed


def test_head_takes_a_layer_of_kv(model: Path, drafting: Settings) -> None:
    with engine_of(model) as plain, engine_of(model, **drafting) as engine:
        assert engine.info.kv_cache_bytes * 3 == plain.info.kv_cache_bytes * 4
