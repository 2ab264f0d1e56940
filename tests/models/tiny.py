"""Tiny random checkpoints of every architecture, written by transformers, and what transformers computes from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases-wide-heads": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, "num_key_value_heads": 4},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3-yarn": ("Qwen3", {"rope_parameters": YARN_ROPE}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "layer_types": MIXED_LAYERS,
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 20.0,
        },
    ),
    "ernie": ("Ernie4_5", {"use_bias": True}),
    "ernie-moe": (
        "Ernie4_5_Moe",
        {
            "use_bias": True,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_norm_min": 0.7,
        },
    ),
}


@dataclass
class Tiny:
    """A checkpoint folder and the model that wrote it."""

    folder: Path
    reference: Any

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return transformers' logits of every position, float32[len(tokens), V]."""
        with torch.no_grad():
            return self.reference(torch.tensor([tokens])).logits[0].numpy()


def write_tiny(case: str, folder: Path) -> Tiny:
    family, settings = CASES[case]
    config_name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_name)(**(SIZES | settings))
    torch.manual_seed(sorted(CASES).index(case))
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 1 or parameter.shape[0] == 1:  # norms and biases start as ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.2)
    reference.save_pretrained(folder)
    return Tiny(folder, reference)
