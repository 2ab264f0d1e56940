"""Adapters as saved and merged by the `peft` library; `nox -s peft` installs it."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.models.loading.adapter import read_adapter
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model, spec_of
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.testing.models.paged import PagedDriver

peft = pytest.importorskip("peft")
EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("case", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "target_modules": EVERYTHING, "lora_alpha": 8},
        {"r": 6, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 3, "use_rslora": True},
        {"r": 2, "target_modules": EVERYTHING, "layers_to_transform": [1]},
    ],
    ids=["everything", "rslora", "one layer"],
)
def test_logits_equal_those_of_merged_weights(tmp_path, case, settings):
    import torch
    from transformers import AutoModelForCausalLM

    folder = write_checkpoint(case, tmp_path / "model")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings))
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = np.random.default_rng(1).integers(0, 160, 40)
    with torch.no_grad():
        expected = adapted.merge_and_unload()(torch.tensor([tokens.tolist()])).logits[0].numpy()
    ops = NumpyOps()
    with open_checkpoint(folder) as checkpoint:
        adapter = read_adapter(tmp_path / "adapter", spec_of(checkpoint).adaptable(), 8)
        ours = load_model(checkpoint, ops, 64).with_adapters([adapter])
    driver = PagedDriver(ours, ops, [tokens.tolist()], 64, places=[1])
    driver.step([(0, len(tokens))])
    np.testing.assert_allclose(np.stack(driver.rows[0].logits), expected, rtol=0, atol=2e-4)
