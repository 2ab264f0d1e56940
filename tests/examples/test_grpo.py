"""The loop of examples/README.md: ten steps of GRPO against a server whose weights it replaces."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.process.messages import UpdateWeights
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.testing.models.texts import greedy, run
from tests.engine.test_control import ordered
from tests.server.processes import serving


def test_log_probabilities_equal_those_of_the_engine(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    path = write_checkpoint("llama", tmp_path / "model", tie_word_embeddings=True, rope_theta=10000.0)
    policy = script("grpo/train").Policy(path, trained=1)
    config = EngineConfig(model="tiny", backend="reference", max_model_len=64, structured_output=False)
    engine, prompt = load_engine(config, path, progress=lambda *_: None), tuple(range(3, 20))
    texts = run(engine, [greedy("one", prompt, 12, logprobs=0)])
    found = policy.logprobs(torch.tensor([[*prompt, *texts.tokens["one"]]]), len(prompt))[0].tolist()
    assert found == pytest.approx([each.logprob for each in texts.scores["one"]], abs=1e-3)
    policy.save(tmp_path / "saved")
    assert ordered(engine, UpdateWeights(str(tmp_path / "saved")), texts) is None
    engine.close()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ten_steps_replace_the_weights_ten_times(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    with serving(tmp_path / "log", "smollm2", "--weights-folder", str(tmp_path)) as server:
        rewards = list(script("grpo/train").train(server.url, tmp_path, steps=10))
        with urllib.request.urlopen(f"{server.url}/v1/control", timeout=10) as answer:
            assert json.load(answer)["weight_version"] == "10"
    assert len(rewards) == 10 and sum(rewards[-4:]) > sum(rewards[:4])
