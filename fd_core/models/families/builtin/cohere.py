"""Command R of Cohere."""

from __future__ import annotations

from typing import Any, ClassVar

from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import Traits, head_dim_of, rope_spec
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.gguf_family import windows

_PATTERN = 4
"""By default, every fourth layer has full attention."""


def _gguf_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return {
        **windows(shape, every=_PATTERN, window=shape.count("attention.sliding_window")),
        "logit_scale": shape.single("logit_scale"),
    }


class Cohere2(Family):
    """`Cohere2ForCausalLM`: attention and feed-forward side by side; layers with full attention have no rope."""

    architectures = ("Cohere2ForCausalLM",)
    model_type = "cohere2"
    defaults: ClassVar = {"tie_word_embeddings": True}
    cases: ClassVar = {
        "mixed": {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-3,
        },
        "biases": {"attention_bias": True, "sliding_window": 200, "layer_types": None},
    }
    gguf: ClassVar = {"cohere2": Gguf(config=_gguf_config)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, with biases if the config has them."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0, interleaved=True)
        count = config.count("num_hidden_layers")
        types = config.layer_types(count)
        if types is None:
            every = config.count("sliding_window_pattern", _PATTERN)
            types = tuple(f"{'sliding' if (layer + 1) % every else 'full'}_attention" for layer in range(count))
        window = config.optional_count("sliding_window", 4096)
        bias = config.flag("attention_bias")
        return Traits(
            rope=lambda layer: rope if types[layer] == "sliding_attention" else rope.unrotated,
            window=lambda layer: window if types[layer] == "sliding_attention" else None,
            qkv_bias=bias,
            output_bias=bias,
            layer_norm=True,
            eps="layer_norm_eps",
            parallel=True,
            head_scale=config.number("logit_scale", 0.0625),
        )
