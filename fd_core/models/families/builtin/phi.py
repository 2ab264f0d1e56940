"""Phi-3 and Phi-4."""

from __future__ import annotations

from typing import Any, ClassVar

from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import Traits, head_dim_of, rope_spec
from fd_core.models.loading.config import ModelConfig


def _gguf_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    window = shape.index("attention.sliding_window", 0) or None
    return {"sliding_window": window, "original_max_position_embeddings": None}  # the rope has it


class Phi3(Family):
    """`Phi3ForCausalLM`, also Phi-4 and Phi-4-mini: q, k and v are stored as one linear, gate and up as another."""

    architectures = ("Phi3ForCausalLM",)
    model_type = "phi3"
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
    cases: ClassVar = {
        "window": {"sliding_window": 7},
        "short-of-long": {
            "original_max_position_embeddings": 256,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 3.0],
                "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
            },
        },
        "long": {
            "original_max_position_embeddings": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 3.0, 3.5, 4.0],
                "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 17.0, 18.0],
            },
            "tie_word_embeddings": True,
        },
    }
    gguf: ClassVar = {"phi3": Gguf(config=_gguf_config, tensors={"ffn_up": "mlp.gate_up_proj"})}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; every layer uses the sliding window, if there is one."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0, rotary=1.0)
        window = config.optional_count("sliding_window")
        return Traits(
            rope=lambda layer: rope,
            window=lambda layer: window,
            fused={"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
        )
