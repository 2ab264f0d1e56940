"""Operating envelopes: the engine rejects settings and models beyond what a plugin declares, at start."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from fd_core.backends.cpu import ReferenceBackend
from fd_core.backends.null import NullBackend
from fd_core.config.envelope import OperatingEnvelope
from fd_core.errors import ConfigError, ModelError
from fd_core.kv.stores.memory import MemoryStore
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.testing.kit.target import parse_target
from tests.engine.helpers import null_engine

OF_THE_ENGINE = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 400,
    "block_size": 16,
    "max_drafts": 8,
    "pipeline_depth": 1,
}
"""Sizes of `null_engine`."""
OF_THE_MODEL = {"vocab_size": 97, "hidden": 16, "inner": 16, "head_dim": 8, "group": 2}
"""Sizes of the kit's checkpoint."""


def test_engine_at_the_edge_of_every_envelope_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for plugin in (NullBackend, ContinuousBatchingScheduler, NumpyPostprocess):
        monkeypatch.setattr(plugin, "envelope", OperatingEnvelope(**OF_THE_ENGINE))
    null_engine().close()
    monkeypatch.setattr(ReferenceBackend, "envelope", OperatingEnvelope(**OF_THE_MODEL))
    parse_target("reference", tmp_path).load().close()


@pytest.mark.parametrize("plugin", [NullBackend, ContinuousBatchingScheduler, NumpyPostprocess])
@pytest.mark.parametrize("name", [name for name, size in OF_THE_ENGINE.items() if size > 1])
def test_setting_beyond_an_envelope_is_rejected(monkeypatch: pytest.MonkeyPatch, plugin: type, name: str) -> None:
    size = OF_THE_ENGINE[name]
    monkeypatch.setattr(plugin, "envelope", OperatingEnvelope(**{**OF_THE_ENGINE, name: size - 1}))
    with pytest.raises(ConfigError, match=rf"{name}={size} exceeds the limit of the .* \({size - 1}\)") as found:
        null_engine()
    assert found.value.field == ("--speculative-config" if name == "max_drafts" else f"--{name.replace('_', '-')}")
    assert str(size - 1) in (found.value.hint or "")


@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_model_beyond_an_envelope_is_rejected_before_loading(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    target = parse_target("reference", tmp_path)
    size = OF_THE_MODEL[name]
    monkeypatch.setattr(ReferenceBackend, "envelope", OperatingEnvelope(**{name: size - 1}))
    monkeypatch.setattr(ReferenceBackend, "load_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match=rf"the model's {name}={size} exceeds the limit of the reference backend"):
        target.load()


def test_experts_beyond_an_envelope_are_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = parse_target("reference", tmp_path)
    for name in ("experts", "top_k"):
        monkeypatch.setattr(ReferenceBackend, "envelope", OperatingEnvelope(**{name: 1}))
        with pytest.raises(ModelError, match=f"the model's {name}="):
            target.load("qwen3-moe")


@pytest.mark.parametrize("limit", [{"max_loras": 7}, {"max_lora_rank": 63}])
def test_adapters_beyond_an_envelope_are_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: dict[str, int]
) -> None:
    monkeypatch.setattr(NullBackend, "envelope", OperatingEnvelope(**limit))
    null_engine().close()
    with pytest.raises(ConfigError, match="exceeds the limit of the null backend"):
        null_engine(lora_folder=str(tmp_path))


@pytest.mark.parametrize("plugin", [NullBackend, ContinuousBatchingScheduler, NumpyPostprocess])
def test_unset_context_length_stays_within_the_envelope(monkeypatch: pytest.MonkeyPatch, plugin: type) -> None:
    monkeypatch.setattr(plugin, "envelope", OperatingEnvelope(max_model_len=333))
    engine = null_engine(max_model_len=None)
    assert engine.info.max_model_len == 333
    engine.close()


def test_blocks_larger_than_values_of_the_store_are_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_bytes(b"x" * 32)
    secret.chmod(0o600)
    settings = {"kv_store": "memory:", "kv_store_secret_file": str(secret)}
    monkeypatch.setattr(MemoryStore, "envelope", OperatingEnvelope(value_bytes=100))
    with pytest.raises(ConfigError, match=r"value_bytes=\d+ exceeds the limit of the KV store memory \(100\)") as found:
        null_engine(**settings)
    assert found.value.field == "--block-size"


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "8"])
def test_limits_of_an_envelope_are_positive_integers(limit: object) -> None:
    with pytest.raises(ValueError, match="hidden"):
        OperatingEnvelope(hidden=limit)  # type: ignore[arg-type]


def test_every_limit_of_an_envelope_is_enforced() -> None:
    tested = {*OF_THE_ENGINE, *OF_THE_MODEL, "experts", "top_k", "max_loras", "max_lora_rank", "value_bytes"}
    assert {field.name for field in fields(OperatingEnvelope)} == tested
    assert replace(OperatingEnvelope(), hidden=4).limits() == {"hidden": 4}
