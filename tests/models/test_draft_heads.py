"""EAGLE-3 heads: drafts equal those computed from the whole text, and texts those without drafts, on every pack."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core.config import SpeculativeConfig
from fd_core.engine.core import Engine
from fd_core.errors import ConfigError, ModelError
from fd_core.models.loading.config import ModelConfig
from fd_core.models.registry import tapped_layers
from fd_core.runner.drafting.eagle import EagleDrafter
from tests.models.heads import reference_drafts, write_head
from tests.models.test_draft_model_packs import PACKS, engine, specs, texts

HELD = {**PACKS, "onnx": {"backend": "cpu+onnx"}}


def headed(target: Path, head: Path, pack: str, k: int = 3, **settings: Any) -> Engine:
    speculative = SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=k, cheap_tokens=1000)
    return plain(target, pack, speculative=speculative, **settings)


def plain(target: Path, pack: str, **settings: Any) -> Engine:
    return engine(target, None, "numpy" if pack == "onnx" else pack, **HELD[pack], **settings)


@pytest.mark.parametrize("pack", ["numpy", "native"])
def test_drafts_equal_those_computed_from_whole_text(tiny, tmp_path: Path, monkeypatch, pack: str) -> None:
    """Even if drafts are accepted and rejected, and requests preempted."""
    target, requests = tiny("llama"), specs()
    texts_of = texts(plain(target.folder, pack), requests).tokens
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
    head = write_head(target.folder, tmp_path / "head", drafts=100)
    pressed = headed(target.folder, head, pack, num_kv_blocks=26)
    assert texts(pressed, requests, eager=True).tokens == texts_of
    stats = pressed.stats().scheduler
    assert stats.counters.preemptions > 0
    assert stats.drafts.proposed > stats.drafts.accepted > stats.drafts.proposed / 3
    for text, drafts in proposed[5::9]:  # the first ones are of the warm-up
        assert drafts == reference_drafts(target.reference, head, text, len(drafts))
    lengths = {len(drafts) for text, drafts in proposed if len(text) < 90}
    assert lengths == {1, 2, 3}, "drafts end with the blocks of a slot"


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
