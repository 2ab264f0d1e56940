"""ModernBERT."""

from __future__ import annotations

from typing import ClassVar, Final

from fd_core.errors import ModelError
from fd_core.models.families.builtin.gemma import ropes_of_kinds
from fd_core.models.families.contract import DenseLayer, Family, OutputLayers, Traits
from fd_core.models.families.encoders.bert import names_of
from fd_core.models.loading.config import ModelConfig

_EVERY: Final = 3
"""By default, every third layer attends to the whole text, the first one included."""


class ModernBert(Family):
    """`ModernBertModel`: norms before each block, rope, most layers with a window on both sides."""

    architectures = names_of("ModernBert")
    model_type = "modernbert"
    defaults: ClassVar = {"hidden_activation": "gelu"}
    cases: ClassVar = {
        "plain": {"num_key_value_heads": 4, "local_attention": 8},
        "biases": {
            "num_key_value_heads": 4,
            "hidden_activation": "silu",
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_eps": 1e-3,
            "local_attention": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, whose config lists the layers with a window or their period."""
        count = config.count("num_hidden_layers")
        every = config.count("global_attn_every_n_layers", _EVERY)
        types = config.layer_types(count) or tuple(
            f"{'sliding' if layer % every else 'full'}_attention" for layer in range(count)
        )
        theta, local = config.number("global_rope_theta", 160_000.0), config.number("local_rope_theta", 10_000.0)
        full, sliding = ropes_of_kinds(config, theta, local, scaled=("full_attention", "sliding_attention"))
        window = config.count("local_attention", 128) // 2 + 1
        bias = config.flag("attention_bias")
        return Traits(
            rope=lambda layer: sliding if types[layer] == "sliding_attention" else full,
            window=lambda layer: window if types[layer] == "sliding_attention" else None,
            causal=False,
            layer_norm=True,
            norm_bias=config.flag("norm_bias"),
            eps="norm_eps",
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=config.flag("mlp_bias"),
            unnormed=(0,),
            embedding_norm="embeddings.norm",
            activation="hidden_activation",
            names={
                "model.embed_tokens": "embeddings.tok_embeddings",
                "model.layers": "layers",
                "model.norm": "final_norm",
                "input_layernorm": "attn_norm",
                "self_attn.o_proj": "attn.Wo",
                "post_attention_layernorm": "mlp_norm",
                "mlp.down_proj": "mlp.Wo",
            },
            fused={"qkv": "attn.Wqkv", "gate_up": "mlp.Wi"},
            ignored=(r"^(head|decoder|classifier)\.",),
        )

    def outputs(self, config: ModelConfig, architecture: str) -> OutputLayers | None:
        """Return the layers that classify a text by its first token or the mean, or each token."""
        activation = config.text("classifier_activation", "gelu")
        layers = (
            DenseLayer("head.dense", activation, "head.norm", config.number("norm_eps", 1e-5)),
            DenseLayer("classifier"),
        )
        pooling = config.text("classifier_pooling", "cls")
        if architecture.endswith("ForTokenClassification"):
            return OutputLayers("all", layers)
        if pooling not in ("cls", "mean"):
            raise ModelError(f"{config.origin}: classifier_pooling must be cls or mean; found {pooling[:40]!r}")
        return OutputLayers("mean" if pooling == "mean" else "cls", layers)
