"""Calibration of engines without a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.errors import ConfigError
from fd_core.models.families.image_processor import image_part
from fd_core.models.families.images.idefics import Idefics3
from fd_core.runner.runner import Runner
from fd_core.simulation.costs.calibrating import Calibration, MachineTooNoisy, calibrate, require_alone
from fd_core.simulation.costs.profile import Costs, parse_profile
from fd_core.testing.models.checkpoints import SIZES, write_config
from fd_core.types import StepOutput, StepPlan
from tests.simulation.costs.plans import decodes

SMALL = EngineConfig(
    model="x", backend="null", max_model_len=128, max_num_seqs=2, max_num_batched_tokens=16, block_size=8
)
ANY = 1e9


@contextmanager
def engine_of(config: EngineConfig) -> Iterator[Engine]:
    engine = load_engine(config, None, progress=lambda *_: None)
    try:
        yield engine
    finally:
        engine.close()


def test_calibrated_engine_serves_afterwards() -> None:
    calls: list[tuple[str, int, int]] = []
    with engine_of(SMALL) as engine:
        how = Calibration("tiny", "a machine", 0.1, ANY, "2026-01-01")
        profile = calibrate(engine, str.split, how, lambda *args: calls.append(args))
        assert not engine.has_work
        engine.check_integrity()
    assert profile.label == "tiny (measured)"
    assert profile.limits.max_num_seqs == 2
    assert profile.limits.max_drafts == 0  # grammars force tokens, but nothing drafts
    assert {error.kind for error in profile.error} == {"decode", "prefill", "mixed"}
    assert Costs(profile).step(decodes(2, 30)) > 0
    assert {name for name, _, _ in calls} == {"turns of the loop", "steps, unmeasured", "steps"}
    assert all(0 <= done < total for _, done, total in calls)
    assert parse_profile(msgspec.json.encode(profile), "here") == profile


def test_draft_cost_is_measured_only_with_a_drafter() -> None:
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    config = EngineConfig(
        model="x", backend="null", max_model_len=128, max_num_seqs=2, max_num_batched_tokens=16, speculative=speculative
    )
    with engine_of(config) as engine:
        verified: list[int] = []
        execute = Runner.execute

        def watched(runner: Runner, plan: StepPlan) -> StepOutput:
            verified.append(int(np.minimum(plan.num_drafts, runner.batch.num_drafts[plan.slots]).sum()))
            return execute(runner, plan)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "execute", watched)
            profile = calibrate(engine, str.split, Calibration("tiny", "a machine", 0.1, ANY), lambda *_: None)
    assert profile.limits.max_drafts == 2
    assert "drafts" in {error.kind for error in profile.error}
    assert max(verified) == 4


def test_encoder_of_images_is_measured(tmp_path: Path) -> None:
    named = {"architectures": list(Idefics3.architectures), "torch_dtype": "float32", "vocab_size": 258}
    write_config({**Idefics3.defaults, **SIZES, **Idefics3.cases["plain"], **named}, tmp_path, seed=4)
    config = EngineConfig(
        model="images",
        backend="reference",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        num_kv_blocks=16,
        structured_output=False,
    )
    engine = load_engine(config, tmp_path, progress=lambda *_: None)
    try:
        image = image_part(np.zeros((48, 48, 3), np.uint8), 16, (4, 4))
        profile = calibrate(engine, str.split, Calibration("tiny", "a machine", 0.1, ANY), lambda *_: None, image)
    finally:
        engine.close()
    assert profile.limits.max_image_tokens >= 16
    assert Costs(profile).images(16) > 0


def test_noisy_machine_is_reported() -> None:
    with engine_of(SMALL) as engine, pytest.raises(MachineTooNoisy, match="stop other work"):
        calibrate(engine, str.split, Calibration("tiny", "a machine", 0.1, 1e-6), lambda *_: None)


@pytest.mark.parametrize(
    "setting",
    [{"role": "decode"}, {"kv_store": "disk:/nowhere"}, {"pipeline_parallel_size": 2}, {"lora_modules": ("a=b",)}],
)
def test_unmeasurable_settings_are_rejected(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="is not measured") as raised:
        require_alone(EngineConfig(model="x", **setting))  # type: ignore[arg-type]
    (name,) = setting
    assert raised.value.field == "--" + name.replace("_", "-")
