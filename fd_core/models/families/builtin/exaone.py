"""EXAONE 4."""

from __future__ import annotations

from typing import ClassVar

from fd_core.errors import ModelError
from fd_core.models.families.contract import Family, Gguf
from fd_core.models.families.spec import Traits, head_dim_of, rope_spec
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.gguf_family import windows


class Exaone4(Family):
    """`Exaone4ForCausalLM`: norms after each block only; with windows, layers with full attention have no rope."""

    architectures = ("Exaone4ForCausalLM",)
    model_type = "exaone4"
    defaults: ClassVar = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5}
    cases: ClassVar = {
        "mixed": {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7,
            "sliding_window_pattern": "LGL",
        },
        "whole": {
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
        },
    }
    gguf: ClassVar = {"exaone4": Gguf(config=lambda shape, tensors: windows(shape))}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model with or without windows."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        count, window = config.count("num_hidden_layers"), config.optional_count("sliding_window", 4096)
        types = config.layer_types(count)
        if types is None:
            if window is not None:
                raise ModelError(f"{config.origin}: layer_types must list the layers with a window")
            types = ("full_attention",) * count
        return Traits(
            rope=lambda layer: rope if window is None or types[layer] == "sliding_attention" else rope.unrotated,
            window=lambda layer: window if types[layer] == "sliding_attention" else None,
            head_norms="before rope",
            norms="after",
        )
