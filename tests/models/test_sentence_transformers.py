"""Embeddings equal those of sentence-transformers on its own checkpoints; `nox -s embeddings` installs it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from fd_core import LLM

sentence_transformers = pytest.importorskip("sentence_transformers")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer  # noqa: E402

from tests.models.encoders.small import written  # noqa: E402

TEXTS = ["hello", "a much longer text about nothing at all", "naïve 東京", "x" * 100]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny random Qwen3 without output projection, whose tokenizer ends each text like Qwen3-Embedding."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = transformers.Qwen3Model(transformers.Qwen3Config(**sizes, **heads)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    tokenizer.add_special_tokens([end])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 256)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, padding_side="left"
    )
    fast.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
def test_embeddings_equal_sentence_transformers(
    base: Path, tmp_path: Path, mode: str, normalize: bool, backend: str
) -> None:
    modules = [Transformer(str(base)), Pooling(64, pooling_mode=mode), *([Normalize()] if normalize else [])]
    model = sentence_transformers.SentenceTransformer(modules=modules, device="cpu")
    model.save_pretrained(str(tmp_path))
    right = model.encode(TEXTS)
    llm = LLM(str(tmp_path), backend=backend, dtype="float32", num_kv_blocks=64, max_num_batched_tokens=48)
    try:
        np.testing.assert_allclose(llm.embed(TEXTS), right, atol=1e-5)
    finally:
        llm.close()


@pytest.mark.parametrize("mode", ["cls", "mean"])
@pytest.mark.parametrize("name", ["bert", "embeddinggemma"])
def test_dense_layers_of_an_encoder_equal_sentence_transformers(tmp_path: Path, name: str, mode: str) -> None:
    written(tmp_path / "base", name)
    (tmp_path / "base" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|end|>", "model_max_length": 220}'
    )
    torch.manual_seed(1)
    dense = [Dense(64, 96, activation_function=torch.nn.Identity()), Dense(96, 32, bias=False)]
    modules = [Transformer(str(tmp_path / "base")), Pooling(64, pooling_mode=mode), *dense, Normalize()]
    model = sentence_transformers.SentenceTransformer(modules=modules, device="cpu")
    model.save_pretrained(str(tmp_path / "whole"))
    right = model.encode(TEXTS)
    with closing(LLM(str(tmp_path / "whole"), backend="cpu", dtype="float32")) as llm:
        np.testing.assert_allclose(llm.embed(TEXTS), right, atol=1e-5)
        assert llm.embed(TEXTS, dimensions=8).shape == (len(TEXTS), 8)


def test_scores_of_a_saved_cross_encoder_equal_sentence_transformers(tmp_path: Path) -> None:
    written(tmp_path / "base", "modernbert", "ForSequenceClassification", num_labels=1)
    (tmp_path / "base" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|end|>", "model_max_length": 220}'
    )
    model = sentence_transformers.CrossEncoder(
        str(tmp_path / "base"), device="cpu", activation_fn=torch.nn.Identity(), num_labels=1
    )
    model.save_pretrained(str(tmp_path / "whole"))
    right = model.predict([("a question", text) for text in TEXTS])
    with closing(LLM(str(tmp_path / "whole"), backend="cpu", dtype="float32")) as llm:
        np.testing.assert_allclose(llm.score("a question", TEXTS), right, atol=1e-5)
