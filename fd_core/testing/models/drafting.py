"""Oracle drafter, which has the complete texts, and random draft heads in the published format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fd_core.config import SpeculativeConfig
from fd_core.runner.drafting import PerSlotDrafter
from fd_core.types import IntArray


def speculation(k: int, model: Path | None = None) -> SpeculativeConfig | None:
    """Return settings for up to `k` drafts per step: of a draft model, or for a drafter that a test installs."""
    if k == 0:
        return None
    method, name = ("ngram", None) if model is None else ("draft_model", str(model))
    return SpeculativeConfig(method=method, model=name, num_speculative_tokens=k, cheap_tokens=1000)


class OracleDrafter(PerSlotDrafter):
    """Drafts from complete texts (prompt and output), wrong in a share of the tokens."""

    name = "knowing"

    def __init__(self, num_slots: int, whole: Sequence[Sequence[int]], wrong: float, seed: int) -> None:
        self._whole = [list(text) for text in whole]
        self._known: list[list[int]] = [[] for _ in range(num_slots)]
        self._rng = np.random.default_rng(seed)
        self._wrong = wrong

    def admit(self, slot: int, tokens: IntArray) -> None:
        self._known[slot] = tokens.tolist()

    def grow(self, slot: int, tokens: IntArray) -> None:
        self._known[slot] += tokens.tolist()

    def guess(self, slot: int, limit: int) -> IntArray:
        """Return the continuation of the text with this prefix; a wrong token is an adjacent id."""
        known = self._known[slot]
        for text in self._whole:
            if text[: len(known)] == known:
                guess = np.array(text[len(known) : len(known) + limit], np.int32)
                wrong = self._rng.random(len(guess)) < self._wrong
                return np.where(wrong, np.where(guess > 0, guess - 1, 1), guess).astype(np.int32)
        return np.empty(0, np.int32)


def write_head(target: Path, folder: Path, *, drafts: int | None = None, **changes: Any) -> Path:
    """Write a head for the target with random weights; it drafts the last `drafts` tokens, all by default."""
    config = json.loads((target / "config.json").read_text())
    hidden, inner, vocab = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    width, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": drafts or vocab}
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, config["num_hidden_layers"]]}
    kept = {name: config[name] for name in config if name not in ("attention_bias", "mlp_bias", "layer_types")}
    rng = np.random.default_rng(7)
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (width, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, width),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (drafts or vocab, hidden),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,),
        "norm": (hidden,),
    }
    tensors: dict[str, Any] = {
        f"{name}.weight": (rng.standard_normal(shape) * 0.3 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    if drafts is not None:
        tensors["d2t"] = np.full(drafts, vocab - drafts, np.int64)
        tensors["t2d"] = np.arange(vocab) >= vocab - drafts
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**kept, **own, **layers, **changes}))
    save_file(tensors, folder / "model.safetensors")
    return folder
