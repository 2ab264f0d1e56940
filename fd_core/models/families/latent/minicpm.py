"""MiniCPM3."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, Final

from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.latent.deepseek import latent_config, latent_traits
from fd_core.models.families.spec import Traits
from fd_core.models.loading.config import ModelConfig

_FACTORS: Final = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}
"""Of the published model; GGUF files do not have them, because llama.cpp has the same constants."""


def _gguf_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return _FACTORS | latent_config(shape, tensors)


class MiniCpm3(Family):
    """`MiniCPM3ForCausalLM`: latent attention, with factors on embeddings, additions and logits."""

    architectures = ("MiniCPM3ForCausalLM",)
    model_type = "minicpm3"
    defaults: ClassVar = {
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "rms_norm_eps": 1e-5,
        **_FACTORS,
        "tie_word_embeddings": True,
    }
    cases: ClassVar = {
        "factors": {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "kv_lora_rank": 24,
            "q_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "attention_bias": True,
            "mlp_bias": True,
            "scale_emb": 3.0,
            "scale_depth": 0.7,
            "dim_model_base": 16,
        },
        "neutral": {
            "num_key_value_heads": 4,
            "head_dim": 4,
            "kv_lora_rank": 17,
            "q_lora_rank": None,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 4,
            "v_head_dim": None,
            "scale_depth": None,
            "dim_model_base": None,
            "tie_word_embeddings": False,
        },
    }

    gguf: ClassVar = {"minicpm3": Gguf(config=_gguf_config)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; a null leaves out its factor."""
        hidden, depth = config.count("hidden_size"), config.optional_number("scale_depth")
        base = config.optional_count("dim_model_base") or hidden
        return replace(
            latent_traits(config, interleaved=False),
            embedding_scale=config.number("scale_emb"),
            residual_scale=1.0 if depth is None else depth / math.sqrt(config.count("num_hidden_layers")),
            head_scale=base / hidden,
        )
