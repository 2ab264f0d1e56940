"""Drafts from hidden states equal those computed from the whole text, and texts those without, on every pack."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fd_core.config import SpeculativeConfig
from fd_core.engine.core import Engine
from fd_core.errors import ConfigError, ModelError
from fd_core.models.loading.config import ModelConfig
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import architecture_of, config_of, family_of, tapped_layers
from fd_core.runner.drafting.eagle import EagleDrafter
from fd_core.testing.models.drafting import write_head
from tests.models.heads import reference_drafts
from tests.models.mtp import Reference, write_mtp_gguf, write_mtp_model
from tests.models.test_draft_model_packs import PACKS, engine, specs, texts

HELD = {**PACKS, "onnx": {"backend": "cpu+onnx"}}


def headed(target: Path, head: Path, pack: str, k: int = 3, **settings: Any) -> Engine:
    speculative = SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=k, cheap_tokens=1000)
    return plain(target, pack, speculative=speculative, **settings)


def plain(target: Path, pack: str, **settings: Any) -> Engine:
    return engine(target, None, "numpy" if pack == "onnx" else pack, **HELD[pack], **settings)


def with_mtp(target: Path, pack: str, **settings: Any) -> Engine:
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=3, cheap_tokens=1000)
    return plain(target, pack, speculative=speculative, **settings)


def compare_drafts(
    target: Path,
    pack: str,
    drafting: Callable[..., Engine],
    reference: Callable[..., list[int]],
    monkeypatch,
    **few: Any,
) -> set[int]:
    """Compare texts and drafts of scarce blocks, with drafts that are accepted; return the lengths of drafts."""
    requests = specs()
    texts_of = texts(plain(target, pack, block_size=few.get("block_size", 4)), requests).tokens
    known = [[*spec.prompt, *texts_of[spec.request_id]] for spec in requests]
    proposed: list[tuple[list[int], list[int]]] = []
    propose = EagleDrafter.propose

    def watched(self: EagleDrafter, slots: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, counts = propose(self, slots, limit)
        lengths = self._given.lengths[self._row_of[slots]]
        for slot, length, row, count in zip(slots, lengths, tokens, counts, strict=True):
            text = self._given.tokens[slot, :length].tolist()
            proposed.append((text, row[:count].tolist()))
            rest = next((each[length : length + len(proposed) % 4] for each in known if each[:length] == text), [])
            row[: min(len(rest), count)] = rest[:count]
        return tokens, counts

    monkeypatch.setattr(EagleDrafter, "propose", watched)
    pressed = drafting(**few)
    assert texts(pressed, requests, eager=True).tokens == texts_of
    stats = pressed.stats().scheduler
    assert stats.counters.preemptions > 0
    assert stats.drafts.proposed > stats.drafts.accepted > stats.drafts.proposed / 3
    for text, drafts in proposed[5::9]:  # the first ones are of the warm-up
        assert drafts == reference(text, len(drafts))
    return {len(drafts) for text, drafts in proposed if len(text) < 90}


@pytest.mark.parametrize("pack", ["numpy", "native"])
def test_drafts_of_head_equal_those_computed_from_whole_text(tiny, tmp_path: Path, monkeypatch, pack: str) -> None:
    target = tiny("llama")
    head = write_head(target.folder, tmp_path / "head", drafts=100)
    drafting = partial(headed, target.folder, head, pack)
    reference = partial(reference_drafts, target.reference, head)
    lengths = compare_drafts(target.folder, pack, drafting, reference, monkeypatch, num_kv_blocks=26)
    assert lengths == {1, 2, 3}, "drafts end with the blocks of a slot"


@pytest.mark.parametrize(
    ("form", "pack"),
    [
        ("deepseek", "native"),
        ("glm", "numpy"),
        ("glm-lite", "torch"),
        ("ernie", "native"),
        ("qwen-next", "numpy"),
        ("qwen-3.5", "native"),
    ],
)
def test_drafts_of_mtp_layer_equal_those_computed_from_whole_text(tmp_path: Path, monkeypatch, form, pack) -> None:
    target = write_mtp_model(form, tmp_path)
    few = {"block_size": None, "num_kv_blocks": 5} if form.startswith("qwen") else {"num_kv_blocks": 26}
    compare_drafts(target, pack, partial(with_mtp, target, pack), Reference(form, target).drafts, monkeypatch, **few)


@pytest.mark.parametrize(
    ("form", "arch"),
    [("deepseek", "deepseek2"), ("glm", "glm4moe"), ("glm-lite", "deepseek2"), ("qwen-next", "qwen3next")],
)
def test_mtp_layer_of_gguf_file_is_that_of_safetensors(tmp_path: Path, form: str, arch: str) -> None:
    target, file = write_mtp_gguf(form, arch, tmp_path)
    with open_checkpoint(target) as right, open_checkpoint(file) as found:
        config = config_of(right)
        family = family_of(architecture_of(config))
        spec = family.mtp(config.filled(family.defaults, family.renamed))
        assert {*found.names()} >= {name for name, _ in spec.tensors()}
        for name, _ in spec.tensors():
            np.testing.assert_allclose(found.read(name).to_float32(), right.read(name).to_float32(), atol=1e-6)
    if form == "glm":
        requests = specs()
        assert texts(with_mtp(file, "numpy"), requests).tokens == texts(plain(target, "numpy"), requests).tokens


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_mtp_layer_is_quantized_with_the_model(tmp_path: Path, form: str) -> None:
    target, requests = write_mtp_model("glm", tmp_path), specs()
    found, drafting = (make(target, "native", quantization=form) for make in (plain, with_mtp))
    packed, more = ({use.computed: use.parameters for use in each.info.weights} for each in (found, drafting))
    assert more[form] > packed[form] and more["float32"] == packed["float32"]
    assert texts(drafting, requests).tokens == texts(found, requests).tokens


def test_mtp_layer_that_is_absent_or_incomplete_is_refused_by_name(tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no layer for multi-token prediction") as caught:
        with_mtp(tiny("llama").folder, "numpy")
    assert caught.value.field == "--speculative-config"
    target = write_mtp_model("glm", tmp_path)
    tensors = load_file(target / "model.safetensors")
    save_file({name: tensors[name] for name in tensors if "hnorm" not in name}, target / "model.safetensors")
    with pytest.raises(ModelError, match=r"Glm4MoeForCausalLM with a layer for multi-token prediction.*3\.hnorm"):
        with_mtp(target, "numpy")
    plain(target, "numpy").close()


@pytest.mark.parametrize("pack", HELD)
def test_drafts_of_random_head_change_no_text(tiny, tmp_path: Path, pack: str) -> None:
    if pack == "onnx" and find_spec("onnxruntime") is None:
        pytest.skip("ONNX Runtime is not installed")
    target = tiny("llama").folder
    pressed = headed(target, write_head(target, tmp_path / "head"), pack, num_kv_blocks=26)
    requests = specs(temperature=1.0)
    assert texts(pressed, requests, eager=True).tokens == texts(plain(target, pack), requests).tokens
    stats = pressed.stats().scheduler
    assert stats.counters.preemptions > 0
    assert stats.drafts.proposed > stats.drafts.accepted


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_key_value_heads": 4}, "4 x 16 elements and share blocks with the target's, which are 2 x 16"),
        ({"hidden_size": 32}, "hidden size is 32, but the target's is 64"),
        ({"draft_vocab_size": 50}, "tensor 'lm_head.weight' has shape"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, r"is \[0, 1, 9\], but the target has 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "fc.weight has shape"),
    ],
)
def test_head_that_does_not_fit_is_refused_by_name(tiny, tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    target = tiny("llama").folder
    head = write_head(target, tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises((ConfigError, ModelError), match=f"draft head: .*{why}") as caught:
        headed(target, head, "numpy")
    assert caught.value.field == "--speculative-config"


def test_layers_of_published_heads_are_found() -> None:
    """SpecForge and NVIDIA name the layers after which hidden states are read, others those before."""
    name = "eagle_aux_hidden_state_layer_ids"
    assert tapped_layers(ModelConfig({}), 32) == (2, 16, 29)
    assert tapped_layers(ModelConfig({name: [2, 16, 29]}), 32) == (2, 16, 29)
    assert tapped_layers(ModelConfig({"eagle_config": {name: [1, 15, 28]}}), 32) == (2, 16, 29)
