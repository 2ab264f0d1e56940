"""8-bit KV cache through the whole engine: memory, stores, pairs, drafts, and unsupported backends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fd_core.config import EngineConfig
from fd_core.engine.core import Engine
from fd_core.errors import ConfigError
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.kit.target import Target
from fd_core.testing.models.texts import greedy, run
from tests.engine.building.test_kv_transfer import Pair
from tests.engine.helpers import null_engine

SPECS = [greedy(f"r{index}", range(index, index + 21), 12) for index in range(3)]
ROOM: dict[str, Any] = {"num_kv_blocks": 60, "max_model_len": 80}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target("reference", "reference", {}, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module", params=["int8", "fp8"])
def target(wide: Target, request: pytest.FixtureRequest) -> Target:
    return wide.changed(kv_cache_dtype=request.param)


@pytest.fixture(scope="module")
def texts(target: Target) -> dict[str, list[int]]:
    with target.engine(**ROOM) as engine:
        return run(engine, SPECS).tokens


def test_name_of_fp8_in_other_servers_is_an_alias() -> None:
    assert EngineConfig(model="null", kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"


@pytest.mark.parametrize("word", ["fp8_e5m2", "fp8_inc"])
def test_foreign_8_bit_dtype_names_get_a_hint(word: str) -> None:
    with pytest.raises(ConfigError, match=f"'{word}' is not supported; use fp8 or int8") as refused:
        EngineConfig(model="null", kv_cache_dtype=word)
    assert refused.value.field == "kv_cache_dtype"


def test_activation_dtype_as_kv_dtype_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'bfloat16' is not supported; use auto, which stores KV in the type"):
        EngineConfig(model="null", kv_cache_dtype="bfloat16")


def test_unsupported_kv_dtype_is_rejected_at_start() -> None:
    with pytest.raises(ConfigError, match="the null backend stores KV in float32, got int8") as refused:
        null_engine(kv_cache_dtype="int8")
    assert refused.value.field == "--kv-cache-dtype"


def test_hint_names_the_8_bit_dtype_of_the_backend(wide: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumpyOps, "kv_dtypes", ("int8",))
    match = "the reference backend stores KV in float32 or int8, got fp8"
    with pytest.raises(ConfigError, match=match) as refused, wide.changed(kv_cache_dtype="fp8").engine():
        pass
    assert refused.value.hint == "use int8, which takes about as much memory"


def test_8_bit_cache_holds_more_tokens_in_same_memory(target: Target, wide: Target) -> None:
    room: dict[str, Any] = {"num_kv_blocks": None, "kv_cache_memory": 200_000, "max_model_len": 60}
    with target.engine(**room) as narrow, wide.engine(**room) as full:
        # A head of 8 elements takes 8 bytes plus a scale if it has one; float32 takes 32 bytes.
        head = 12 if target.kv_dtype == "int8" else 8
        assert narrow.info.num_kv_blocks == pytest.approx(32 / head * full.info.num_kv_blocks, abs=3)
        assert narrow.info.kv_cache_bytes <= 200_000


def test_draft_cache_uses_the_same_kv_dtype(target: Target, texts: dict[str, list[int]]) -> None:
    speculative = {"method": "draft_model", "model": str(target.checkpoint()), "num_speculative_tokens": 3}
    with target.engine(speculative=speculative, **ROOM) as engine:
        plain = engine.probe().runner.cache.shape
        drafter = engine.probe().runner.drafter
        assert drafter is not None and drafter.kv_shape == plain
        assert run(engine, SPECS).tokens == texts
        drafts = engine.stats().scheduler.drafts
        assert drafts.proposed == drafts.accepted > 0, "it drafts for itself"


def test_stored_8_bit_kv_is_loaded_by_another_engine(
    target: Target, texts: dict[str, list[int]], secrets: dict[str, str], tmp_path: Path
) -> None:
    kept = {"kv_store": f"disk:{tmp_path / 'kv'}", **ROOM, **secrets}
    for loaded in (0, 5 * 4):  # blocks of 4 tokens; the last token of a prompt is always computed
        with target.engine(**kept) as engine:
            assert run(engine, SPECS[:1]).tokens["r0"] == texts["r0"]
            assert engine.stats().scheduler.offload.loaded_tokens == loaded


def test_kv_of_another_dtype_is_a_store_miss(
    target: Target, wide: Target, secrets: dict[str, str], tmp_path: Path
) -> None:
    kept = {"kv_store": f"disk:{tmp_path / 'kv'}", **ROOM, **secrets}
    other = {"int8": "fp8", "fp8": "int8"}[target.kv_dtype]
    for each in (target, target.changed(kv_cache_dtype=other), wide):
        with each.engine(**kept) as engine:
            run(engine, SPECS[:1])
            assert engine.stats().scheduler.offload.loaded_tokens == 0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def paired(stack: ExitStack, secrets: dict[str, str], prefill: Target, decode: Target) -> Pair:
    def start(target: Target, role: str) -> Engine:
        return stack.enter_context(target.engine(role=role, **ROOM, **secrets))

    return Pair(start(prefill, "prefill"), start(decode, "decode"))


def test_pair_transfers_8_bit_kv(
    target: Target, texts: dict[str, list[int]], secrets: dict[str, str], stack: ExitStack
) -> None:
    two = paired(stack, secrets, target, target)
    two.run(*SPECS)
    assert two.texts.tokens == texts
    assert set(two.outcomes.values()) == {"transferred"}


def test_pair_with_different_kv_dtypes_is_rejected(
    target: Target,
    wide: Target,
    texts: dict[str, list[int]],
    secrets: dict[str, str],
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = paired(stack, secrets, wide, target)
    two.run(SPECS[0])
    assert two.outcomes == {"r0": "refused"}
    assert two.texts.tokens["r0"] == texts["r0"]
    two.until(
        lambda: (
            f"the dtype of the KV is float32 at the prefill worker and {target.kv_dtype} at the decode" in caplog.text
        ),
        5,
    )
