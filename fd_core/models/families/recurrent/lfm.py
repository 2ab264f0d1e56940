"""LFM2."""

from __future__ import annotations

from typing import Any, ClassVar

from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import (
    LinearSpec,
    NormSpec,
    RecurrentSpec,
    Traits,
    VectorSpec,
    head_dim_of,
    rope_spec,
)
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.gguf_family import layers_with


def _gguf_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    attends = layers_with(shape, "attention.head_count_kv")
    return {
        "layer_types": ["full_attention" if each else "conv" for each in attends],
        "conv_L_cache": shape.count("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in tensors),
        "block_auto_adjust_ff_dim": False,
    }


class Lfm2(Family):
    """`Lfm2ForCausalLM`: gated short convolutions, and some layers with attention."""

    architectures = ("Lfm2ForCausalLM",)
    model_type = "lfm2"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
    }
    cases: ClassVar = {
        "adjusted": {
            "norm_eps": 1e-4,
            "block_multiple_of": 24,
            "block_ffn_dim_multiplier": 1.3,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        "biases": {
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "full_attn_idxs": [2],
            "layer_types": ["conv", "conv", "full_attention"],
        },
    }

    gguf: ClassVar = {
        "lfm2": Gguf(
            config=_gguf_config,
            tensors={
                "attn_norm": "operator_norm",
                "ffn_norm": "ffn_norm",
                "attn_output": "self_attn.out_proj",
                "attn_q_norm": "self_attn.q_layernorm",
                "attn_k_norm": "self_attn.k_layernorm",
                "ffn_gate": "feed_forward.w1",
                "ffn_up": "feed_forward.w3",
                "ffn_down": "feed_forward.w2",
                "shortconv.conv": "conv.conv",
                "shortconv.in_proj": "conv.in_proj",
                "shortconv.out_proj": "conv.out_proj",
            },
            top=dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm"),
        )
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model."""
        rope = rope_spec(config, head_dim_of(config), theta=1_000_000.0)
        hidden, layers, bias = config.count("hidden_size"), config.count("num_hidden_layers"), config.flag("conv_bias")
        attends = config.indices("full_attn_idxs") if config.values.get("full_attn_idxs") is not None else range(layers)
        types = config.layer_types(layers, "conv") or tuple(
            "full_attention" if layer in attends else "conv" for layer in range(layers)
        )
        taps = config.count("conv_L_cache")

        def recurrent(layer: int, prefix: str, norm: NormSpec | None) -> RecurrentSpec | None:
            if types[layer] == "full_attention":
                return None
            return RecurrentSpec(
                norm=norm,
                inputs=LinearSpec((f"{prefix}.conv.in_proj",), (hidden,) * 3, hidden, bias=bias),
                output=LinearSpec((f"{prefix}.conv.out_proj",), (hidden,), hidden, bias=bias),
                rule="gate",
                conv=VectorSpec(f"{prefix}.conv.conv.weight", (hidden, 1, taps)),
                conv_bias=VectorSpec(f"{prefix}.conv.conv.bias", (hidden,)) if bias else None,
            )

        return Traits(
            rope=lambda layer: rope,
            recurrent=recurrent,
            head_norms="before rope",
            eps="norm_eps",
            inner=self.inner(config),
            activation="silu",
            names={
                "model.norm": "model.embedding_norm",
                "input_layernorm": "operator_norm",
                "post_attention_layernorm": "ffn_norm",
                "self_attn.o_proj": "self_attn.out_proj",
                "self_attn.q_norm": "self_attn.q_layernorm",
                "self_attn.k_norm": "self_attn.k_layernorm",
                "mlp.gate_proj": "feed_forward.w1",
                "mlp.up_proj": "feed_forward.w3",
                "mlp.down_proj": "feed_forward.w2",
            },
        )

    def inner(self, config: ModelConfig) -> int:
        """Return the width of feed-forward blocks: two thirds of the config's, rounded up, unless it is exact."""
        inner = config.count("block_ff_dim", config.count("intermediate_size"))
        if not config.flag("block_auto_adjust_ff_dim"):
            return inner
        inner, factor = int(2 * inner / 3), config.optional_number("block_ffn_dim_multiplier")
        if factor is None:
            return inner
        multiple = config.count("block_multiple_of")
        return -(-int(factor * inner) // multiple) * multiple
