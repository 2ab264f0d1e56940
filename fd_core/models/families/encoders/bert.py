"""BERT, DistilBERT, RoBERTa and XLM-RoBERTa: norms of the stream after each block, learned positions, token types.

DistilBERT lacks the types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from fd_core.errors import ModelError
from fd_core.models.families.contract import DenseLayer, Family, OutputLayers, RopeSpec, Traits
from fd_core.models.loading.config import ModelConfig

_TABLES: Final = "embeddings"
_NAMES: Final = {
    "model.embed_tokens": f"{_TABLES}.word_embeddings",
    "model.layers": "encoder.layer",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "post_attention_layernorm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "post_feedforward_layernorm": "output.LayerNorm",
}
_UNROTATED: Final = RopeSpec(())


def names_of(name: str) -> tuple[str, ...]:
    """Return the names of an encoder's architectures."""
    outputs = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    return tuple(f"{name}{output}" for output in outputs)


class Bert(Family):
    """`BertModel`: positions from 0 on, and two types of tokens."""

    architectures = names_of("Bert")
    model_type = "bert"
    defaults: ClassVar = {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
    cases: ClassVar = {
        "plain": {"num_key_value_heads": 4},
        "other": {"num_key_value_heads": 4, "hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-3},
    }
    names: ClassVar[Mapping[str, str]] = _NAMES
    eps: ClassVar[str | float] = "layer_norm_eps"
    types: ClassVar[str] = f"{_TABLES}.token_type_embeddings"
    head: ClassVar[tuple[DenseLayer, ...]] = (DenseLayer("pooler.dense", "tanh"), DenseLayer("classifier"))

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model. Raises `ModelError` for relative positions, and for a decoder."""
        config.refuse("is_decoder", "only encoders of this architecture are supported")
        kind = config.text("position_embedding_type", "absolute")
        if kind != "absolute":
            raise ModelError(f"{config.origin}: position_embedding_type {kind[:40]!r} is not supported; only absolute")
        return Traits(
            rope=lambda layer: _UNROTATED,
            causal=False,
            norms="stream",
            layer_norm=True,
            norm_bias=True,
            eps=self.eps,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            gated=False,
            names=self.names,
            types=self.types,
            positions=f"{_TABLES}.position_embeddings",
            first_position=self.first_position(config),
            embedding_norm=f"{_TABLES}.LayerNorm",
            ignored=(r"position_ids$", r"^(cls|lm_head|pooler|classifier|pre_classifier|vocab_\w+)\."),
        )

    def first_position(self, config: ModelConfig) -> int:
        """Return the row of the first position."""
        return 0

    def outputs(self, config: ModelConfig, architecture: str) -> OutputLayers | None:
        """Return the layers that classify a text by its first token, or each token."""
        if architecture.endswith("ForTokenClassification"):
            return OutputLayers("all", self.head[-1:])
        return OutputLayers("cls", self.head)


class DistilBert(Bert):
    """`DistilBertModel`: BERT without types of tokens."""

    architectures = names_of("DistilBert")
    model_type = "distilbert"
    defaults: ClassVar = {"activation": "gelu"}
    renamed: ClassVar = {
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "hidden_act": "activation",
    }
    cases: ClassVar = {
        "plain": {"num_key_value_heads": 4, "hidden_dim": 96},
        "other": {"num_key_value_heads": 4, "hidden_dim": 48, "activation": "relu"},
    }
    names: ClassVar[Any] = {
        "model.embed_tokens": f"{_TABLES}.word_embeddings",
        "model.layers": "transformer.layer",
        "self_attn.q_proj": "attention.q_lin",
        "self_attn.k_proj": "attention.k_lin",
        "self_attn.v_proj": "attention.v_lin",
        "self_attn.o_proj": "attention.out_lin",
        "post_attention_layernorm": "sa_layer_norm",
        "mlp.up_proj": "ffn.lin1",
        "mlp.down_proj": "ffn.lin2",
        "post_feedforward_layernorm": "output_layer_norm",
    }
    eps: ClassVar = 1e-12
    types: ClassVar = ""
    head: ClassVar = (DenseLayer("pre_classifier", "relu"), DenseLayer("classifier"))


class Roberta(Bert):
    """`RobertaModel`: positions begin after the padding id."""

    architectures = names_of("Roberta")
    model_type = "roberta"
    cases: ClassVar[Any] = {
        "plain": {"num_key_value_heads": 4, "pad_token_id": 1},
        "other": {"num_key_value_heads": 4, "pad_token_id": 4, "hidden_act": "gelu_new", "type_vocab_size": 1}
        | {"layer_norm_eps": 1e-3},
    }
    head: ClassVar = (DenseLayer("classifier.dense", "tanh"), DenseLayer("classifier.out_proj"))

    def first_position(self, config: ModelConfig) -> int:
        """Return the row after that of padding."""
        return config.index("pad_token_id", 1) + 1

    def outputs(self, config: ModelConfig, architecture: str) -> OutputLayers | None:
        """Return the layers that classify a text by its first token, or each token."""
        if architecture.endswith("ForTokenClassification"):
            return OutputLayers("all", (DenseLayer("classifier"),))
        return OutputLayers("cls", self.head)


class XlmRoberta(Roberta):
    """`XLMRobertaModel`: RoBERTa for many languages."""

    architectures = names_of("XLMRoberta")
    model_type = "xlm-roberta"
