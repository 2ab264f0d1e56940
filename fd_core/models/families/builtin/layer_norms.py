"""Decoders with layer norms: StableLM 2, StarCoder2 and Nemotron."""

from __future__ import annotations

from typing import Any, ClassVar

from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import Traits, head_dim_of, rope_spec
from fd_core.models.loading.config import ModelConfig


def _stablelm_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
    }


def _starcoder2_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in tensors, "hidden_act": "gelu_pytorch_tanh"}


class StableLm(Family):
    """`StableLmForCausalLM`: a quarter of each head is rotated."""

    architectures = ("StableLmForCausalLM",)
    model_type = "stablelm"
    defaults: ClassVar = {"num_key_value_heads": 32}
    cases: ClassVar = {
        "biases": {"use_qkv_bias": True, "layer_norm_eps": 1e-3, "partial_rotary_factor": 0.25},
        "parallel": {"use_parallel_residual": True, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    }
    gguf: ClassVar = {"stablelm": Gguf(config=_stablelm_config)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model. Raises `ModelError` for norms with other weights for each head."""
        config.refuse("qk_layernorm", "norms with other weights for each head are not supported")
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0, rotary=0.25)
        return Traits(
            rope=lambda layer: rope,
            qkv_bias=config.flag("use_qkv_bias"),
            layer_norm=True,
            norm_bias=True,
            eps="layer_norm_eps",
            parallel=config.flag("use_parallel_residual"),
        )


class StarCoder2(Family):
    """`Starcoder2ForCausalLM`: feed-forward blocks without a gate; one flag adds a bias to every linear."""

    architectures = ("Starcoder2ForCausalLM",)
    model_type = "starcoder2"
    defaults: ClassVar = {"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    cases: ClassVar = {
        "biases": {"use_bias": True, "tie_word_embeddings": True, "norm_epsilon": 1e-3},
        "window": {"use_bias": False, "sliding_window": 7, "hidden_act": "gelu"},
    }
    gguf: ClassVar = {
        "starcoder2": Gguf(config=_starcoder2_config, tensors={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; every layer uses the sliding window, if there is one."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        window = config.optional_count("sliding_window")
        bias = config.flag("use_bias", True)
        return Traits(
            rope=lambda layer: rope,
            window=lambda layer: window,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            layer_norm=True,
            norm_bias=True,
            eps="norm_epsilon",
            gated=False,
            names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
        )


class Nemotron(Family):
    """`NemotronForCausalLM`: feed-forward blocks without a gate, norms with `1 + weight`, half of a head rotated."""

    architectures = ("NemotronForCausalLM",)
    model_type = "nemotron"
    defaults: ClassVar = {"hidden_act": "relu2"}
    cases: ClassVar = {
        "plain": {"hidden_act": "relu2", "partial_rotary_factor": 0.5, "norm_eps": 1e-3},
        "biases": {"attention_bias": True, "mlp_bias": True, "hidden_act": "relu", "partial_rotary_factor": 1.0},
    }
    gguf: ClassVar = {"nemotron": Gguf(config=lambda shape, tensors: {"hidden_act": "relu2"}, norm_offset=1.0)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, with biases if the config has them."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0, rotary=0.5)
        bias = config.flag("attention_bias")
        return Traits(
            rope=lambda layer: rope,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=config.flag("mlp_bias"),
            layer_norm=True,
            norm_bias=True,
            norm_offset=1.0,
            eps="norm_eps",
            gated=False,
        )
