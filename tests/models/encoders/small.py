"""Small random encoders, saved by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, processors

from tests.server.fakes import byte_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 300}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "max_position_embeddings": 220}
ROTATED: dict[str, Any] = {
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"type_vocab_size": 2}),
    "bert_relu": (
        "Bert",
        {"type_vocab_size": 3, "hidden_act": "relu", "layer_norm_eps": 1e-3, "num_attention_heads": 1},
    ),
    "distilbert": (
        "DistilBert",
        {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "activation": "relu", "seq_classif_dropout": 0.0},
    ),
    "roberta": ("Roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm_roberta": ("XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 4, "hidden_act": "gelu_new"}),
    "modernbert": ("ModernBert", ROTATED | {"local_attention": 8}),
    "modernbert_biases": (
        "ModernBert",
        ROTATED
        | {"local_attention": 130, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "norm_eps": 1e-3}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"classifier_pooling": "mean", "classifier_bias": True, "classifier_activation": "relu"},
    ),
    "embeddinggemma": (
        "Gemma3Text",
        {"use_bidirectional_attention": True, "sliding_window": 9, "num_key_value_heads": 2, "head_dim": 16}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}
"""By name: the prefix of the classes, and what differs from the sizes above."""


def written(folder: Path, name: str, output: str = "Model", seed: int = 0, **more: Any) -> Any:
    """Write an encoder with random weights, norms and biases, and return it."""
    prefix, config = CONFIGS[name]
    torch.manual_seed(seed)
    settings = getattr(transformers, f"{prefix}Config")(**SIZES | HEADS | config | more)
    model = getattr(transformers, f"{prefix}{output}")(settings).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    tokenizer = Tokenizer.from_str(byte_tokenizer().backend.to_str())
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    first, last = (("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]")))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[first, last]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def pooled_by(folder: Path, mode: str, *more: dict[str, str]) -> None:
    """Declare the pooling of a folder, and `more` modules, in the layout of sentence-transformers."""
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    for module in more:
        (folder / module["path"]).mkdir()
        (folder / module["path"] / "config.json").write_text("{}")
    (folder / "modules.json").write_text(json.dumps([*modules, *more]))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))


def states_of(model: Any, ids: list[int], **more: Any) -> Any:
    """Return the final states of a text's tokens."""
    with torch.no_grad():
        return model(torch.tensor([ids]), **more).last_hidden_state[0]
