"""Small random checkpoints of architectures that no family serves, written by `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from fd_core.backends.contract import Model
from fd_core.backends.cpu import CpuBackend
from fd_core.config import EngineConfig
from fd_core.ops.contract import Ops

TOKENS = 97
_USUAL: dict[str, Any] = {"vocab_size": TOKENS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PLAIN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GROUPED = _PLAIN | {"num_key_value_heads": 2, "head_dim": 8}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
MODELS: dict[str, dict[str, Any]] = {
    "Apertus": GROUPED,
    "Arcee": GROUPED,
    "Cohere": GROUPED,
    "DeepseekV2": _PLAIN | _LATENT | _EXPERTS | {"num_key_value_heads": 4, "first_k_dense_replace": 1},
    "DiffLlama": GROUPED,
    "GPT2": _GPT,
    "GPTJ": _GPT | {"rotary_dim": 4},
    "GPTNeoX": _PLAIN,
    "Helium": GROUPED,
    "MiniMaxM2": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Ministral": GROUPED | {"sliding_window": 6},
    "OPT": _PLAIN | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo": GROUPED,
    "Persimmon": _PLAIN,
    "Phi": _PLAIN,
    "VaultGemma": GROUPED | {"sliding_window": 6, "attn_logit_softcapping": 3.0},
}
"""Prefix of the classes of `transformers` to fields of the config: heads of several sizes, learned positions, windows,
experts, latent and differential attention."""


def write(name: str, folder: Path, **fields: Any) -> Any:
    """Write a model of `MODELS`, or of another name with `fields`, and return it with eager attention."""
    config = getattr(transformers, f"{name}Config")(**_USUAL | MODELS.get(name, {}) | fields)
    known = (f"{name}{end}" for end in ("ForCausalLM", "LMHeadModel") if hasattr(transformers, f"{name}{end}"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, next(known))._from_config(config, attn_implementation="eager").eval()
        for parameter in model.parameters():  # logits that differ between tokens
            scale = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.data.add_(torch.randn_like(parameter), alpha=scale)
    model.save_pretrained(folder)
    return model


def change_config(folder: Path, **fields: Any) -> None:
    """Overwrite fields of a checkpoint's config; None removes one."""
    file = folder / "config.json"
    values = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def load(folder: Path, **settings: Any) -> tuple[Model, Ops]:
    """Load a checkpoint with the code of `transformers` on the cpu backend, in float32 unless set otherwise."""
    values = {"dtype": "float32", "model_impl": "transformers", "num_threads": 1, "native_kernels": False}
    backend = CpuBackend(EngineConfig(model=str(folder), backend="cpu", **values | settings))
    ops = backend.make_ops()
    return backend.load_model(folder, ops, lambda *_: None), ops


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    """Return the logits of each token that `transformers` computes."""
    with torch.no_grad():
        found: np.ndarray = model(torch.tensor([tokens])).logits[0].numpy()
    return found


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, TOKENS, length).tolist() for length in lengths]
