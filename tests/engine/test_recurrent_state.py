"""Models with recurrent layers: their states, in the blocks of attention layers, keep every promise about texts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from fd_core.config import SpeculativeConfig
from fd_core.config.layer_groups import LayerGroups
from fd_core.errors import ConfigError
from fd_core.models.families.recurrent.lfm import Lfm2
from fd_core.models.families.recurrent.mamba import GraniteHybrid
from fd_core.models.families.recurrent.qwen import Qwen3Next
from fd_core.testing.models.checkpoints import SIZES, write_config
from fd_core.testing.models.drafting import OracleDrafter
from fd_core.testing.models.texts import run
from tests.engine.building.test_kv_transfer import Pair
from tests.engine.helpers import random_specs
from tests.engine.test_layer_groups import PACKS, engine_of, run_preempted, wait_until_stored
from tests.engine.ways import WAYS

SPECS: Final = random_specs(5, seed=3, max_prompt=60, max_tokens=25)
BLOCK: Final = 8
MODELS: Final[dict[str, tuple[type[Any], dict[str, Any]]]] = {
    "lfm2": (Lfm2, Lfm2.cases["adjusted"]),
    "granite": (
        GraniteHybrid,
        {**GraniteHybrid.cases["dense"], "mamba_expand": 1, "mamba_d_head": 8, "mamba_d_state": 4, "head_dim": 32},
    ),
    "qwen3_next": (Qwen3Next, {**Qwen3Next.cases["plain"], "linear_num_value_heads": 2, "head_dim": 32}),
}


@pytest.fixture(scope="module", params=["lfm2", "qwen3_next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, case = MODELS[request.param]
    folder = tmp_path_factory.mktemp("recurrent") / request.param
    named = {"architectures": list(family.architectures), "torch_dtype": "float32", "vocab_size": 258}
    write_config({**family.defaults, **SIZES, **case, "tie_word_embeddings": False, **named}, folder, seed=4)
    return folder


def settings_of(**changes: Any) -> dict[str, Any]:
    return {"dtype": "float32", "block_size": BLOCK, "structured_output": False, **changes}


@cache
def golden(folder: Path, *changes: tuple[str, Any]) -> dict[str, list[int]]:
    """Return the texts of an engine whose memory suffices."""
    with engine_of(folder, **settings_of(**dict(changes))) as engine:
        assert engine.info.groups == LayerGroups(1, 2, window=2)
        return run(engine, SPECS).tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.law("4")
@pytest.mark.in_turn(4)
def test_settings_do_not_change_texts(model: Path, way: str) -> None:
    with engine_of(model, **settings_of(**WAYS[way])) as engine:
        for _ in range(2):  # from the cache of prefixes, too
            assert run(engine, SPECS).tokens == golden(model)
        assert (engine.stats().scheduler.blocks.used, engine.stats().scheduler.blocks.fenced) == (0, 0)
        engine.check_integrity()


@pytest.mark.law("5.2")
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("saves", [True, False])
def test_preempted_requests_go_on_from_saved_states(
    model: Path, kv: str, secrets: dict[str, str], tmp_path: Path, saves: bool
) -> None:
    settings = settings_of(kv_cache_dtype=kv, backend="cpu", block_size=BLOCK if kv == "auto" else 12)
    store = {"kv_store": f"disk:{tmp_path}/kv", "host_kv_memory": 0, **secrets} if saves else {}
    store = store or {"save_preempted_kv": False}
    blocks = 31 if kv == "auto" else 19
    with engine_of(model, num_kv_blocks=blocks, max_model_len=90, max_num_seqs=5, **store, **settings) as engine:
        texts = run_preempted(engine, SPECS)
        counters, offload = engine.stats().scheduler.counters, engine.stats().scheduler.offload
        assert counters.preemptions
        assert offload.loaded_tokens or not saves
        assert not texts.errors
        if kv == "auto":  # 8 bits show rounding errors of sums in another order
            assert texts.tokens == golden(model)
        engine.check_integrity()


@pytest.mark.law("5.2")
@pytest.mark.parametrize("model", ["granite"], indirect=True)
def test_states_of_mamba_survive(model: Path, secrets: dict[str, str], tmp_path: Path) -> None:
    test_settings_do_not_change_texts(model, "two ranks")
    test_preempted_requests_go_on_from_saved_states(model, "int8", saves=True, secrets=secrets, tmp_path=tmp_path)
    test_rejected_drafts_leave_no_trace(model, "cpu")


@pytest.mark.law("6.2")
def test_pair_transfers_states(model: Path, secrets: dict[str, str]) -> None:
    settings = settings_of()
    with (
        engine_of(model, role="prefill", **secrets, **settings) as prefill,
        engine_of(model, role="decode", **secrets, **settings) as decode,
    ):
        pair = Pair(prefill, decode)
        pair.run(*SPECS)
        assert pair.texts.tokens == golden(model)
        assert "transferred" in pair.outcomes.values()


@pytest.mark.law("6.2")
@pytest.mark.parametrize("model", ["lfm2"], indirect=True)
def test_pair_with_other_ranks_computes_states_again(model: Path, secrets: dict[str, str], caplog: Any) -> None:
    settings = settings_of(backend="cpu", **secrets)
    with (
        engine_of(model, role="prefill", tensor_parallel_size=2, **settings) as prefill,
        engine_of(model, role="decode", **settings) as decode,
    ):
        pair = Pair(prefill, decode)
        pair.run(*SPECS[:2])
        assert pair.texts.tokens == {spec.request_id: golden(model)[spec.request_id] for spec in SPECS[:2]}
        assert "transferred" not in pair.outcomes.values()
    assert "the number of ranks that divide recurrent states is 2 at the prefill worker and 1 at" in caplog.text


@pytest.mark.law("4")
@pytest.mark.parametrize("pack", ["reference", "cpu"])
def test_rejected_drafts_leave_no_trace(model: Path, pack: str) -> None:
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3, cheap_tokens=1000)
    with engine_of(model, **settings_of(**PACKS[pack], speculative=speculative, block_size=12)) as engine:
        texts = [[*spec.prompt, *golden(model)[spec.request_id]] for spec in SPECS]
        engine.probe().runner.drafter = OracleDrafter(4, texts, 0.3, 0)
        for _ in range(2):
            assert run(engine, SPECS).tokens == golden(model)
        drafts = engine.stats().scheduler.drafts
        assert 0 < drafts.accepted < drafts.proposed


def test_block_holds_a_state(model: Path) -> None:
    with engine_of(model, **settings_of(block_size=None, structured_output=True)) as engine:
        assert engine.info.block_size == 32
    with (
        pytest.raises(ConfigError, match="block_size=1 is less than") as refused,
        engine_of(model, **settings_of(block_size=1)),
    ):
        pass
    assert refused.value.field == "--block-size"


@pytest.mark.law("5.2")
@pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
def test_states_survive_in_a_store_for_as_many_ranks(model: Path, secrets: dict[str, str], tmp_path: Path) -> None:
    """A later turn of a conversation begins with the text that was stored, and is computed after a restart."""
    store = {"kv_store": f"disk:{tmp_path}/kv", "host_kv_memory": 0, **secrets}
    first = golden(model)
    turns = [replace(spec, prompt=(*spec.prompt, *first[spec.request_id], 7, 8, 9)) for spec in SPECS]
    with engine_of(model, **settings_of()) as engine:
        later = run(engine, turns).tokens
    loaded = []
    for ranks, specs, expected in ((1, SPECS, first), (1, turns, later), (2, turns, later)):
        with engine_of(model, **settings_of(backend="cpu", tensor_parallel_size=ranks), **store) as engine:
            assert run(engine, specs).tokens == expected
            wait_until_stored(engine)
            loaded.append(engine.stats().scheduler.offload.loaded_tokens)
    assert loaded[1] > loaded[0] == loaded[2] == 0


def test_draft_model_with_recurrent_layers_is_refused(model: Path) -> None:
    speculative = SpeculativeConfig(method="draft_model", model=str(model))
    with (
        pytest.raises(ConfigError, match="recurrent layers, which a draft model cannot have"),
        engine_of(model, **settings_of(speculative=speculative, block_size=12)),
    ):
        pass
