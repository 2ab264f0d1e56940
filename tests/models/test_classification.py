"""Probabilities of classes equal those of transformers on its own checkpoints, in Python and over HTTP."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core import LLM, AsyncLLM
from fd_core.config import EngineConfig
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.clients.launch import open_client
from fd_core.errors import BadRequest, ModelError
from tests.server.fakes import byte_tokenizer, live

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXTS = ["hello", "a longer text about nothing at all", "x" * 70]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "max_num_batched_tokens": 48, "max_model_len": 128}


def written(folder: Path, family: str = "Qwen3", **config: Any) -> Any:
    """Write a tiny random classifier, and return it."""
    torch.manual_seed(0)
    settings = getattr(transformers, f"{family}Config")(**SIZES, **HEADS, **config)
    model = getattr(transformers, f"{family}ForSequenceClassification")(settings).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    return model


def logits(model: Any, text: str) -> Any:
    with torch.no_grad():
        return model(torch.tensor([list(text.encode())])).logits[0]


@pytest.mark.parametrize("family", ["Qwen2", "Llama", "Mistral", "StableLm", "Starcoder2"])
def test_probabilities_equal_transformers(tmp_path: Path, family: str) -> None:
    model = written(tmp_path, family)
    right = np.array([torch.softmax(logits(model, text), 0).numpy() for text in TEXTS])
    with closing(LLM(str(tmp_path), backend="cpu", **SETTINGS)) as llm:
        np.testing.assert_allclose(llm.classify(TEXTS), right, atol=1e-5)


def test_every_way_of_use_gives_the_same_probabilities(tmp_path: Path) -> None:
    model = written(tmp_path, id2label={0: "bad", 1: "fair", 2: "good"})
    right = np.array([torch.softmax(logits(model, text), 0).numpy() for text in TEXTS])
    with closing(LLM(str(tmp_path), backend="cpu", **SETTINGS)) as llm:
        np.testing.assert_allclose(llm.classify(TEXTS), right, atol=1e-5)
        vectors, cosines = llm.embed(TEXTS, dimensions=8), llm.score("hello", TEXTS)
        with pytest.raises(BadRequest, match="cannot generate text"):
            llm.generate("a")

    async def use() -> tuple[Any, Any, Any]:
        async with AsyncLLM(str(tmp_path), backend="cpu", **SETTINGS) as llm:
            with pytest.raises(BadRequest, match="prompt 1: "):
                await llm.classify(["a", "x" * 200, "b"])
            calls = llm.classify(TEXTS), llm.embed(TEXTS, dimensions=8), llm.score("hello", TEXTS)
            return await asyncio.gather(*calls)

    for found, expected in zip(asyncio.run(use()), (right, vectors, cosines), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)

    async def client() -> EngineClient:
        return await open_client(EngineConfig(model="m", backend="reference", **SETTINGS), tmp_path, where="inproc")

    with live(client) as server:
        for path in ("/v1/classify", "/classify"):
            answer = server.post(path, {"input": [list(text.encode()) for text in TEXTS]}).json
            np.testing.assert_allclose([each["probs"] for each in answer["data"]], right, atol=1e-5)
        labels = ["bad", "fair", "good"]
        assert [each["label"] for each in answer["data"]] == [labels[index] for index in right.argmax(1)]
        assert (answer["data"][0]["num_classes"], answer["usage"]["prompt_tokens"]) == (3, sum(map(len, TEXTS)))


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"num_labels": 1}, torch.sigmoid),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"num_labels": 1, "problem_type": "regression"}, lambda found: found),
    ],
)
def test_problem_type_selects_the_activation(tmp_path: Path, config: dict[str, Any], activation: Any) -> None:
    model = written(tmp_path, **config)
    right = activation(logits(model, "hello")).numpy()
    with closing(LLM(str(tmp_path), backend="reference", **SETTINGS)) as llm:
        np.testing.assert_allclose(llm.classify("hello"), [right], atol=1e-5)
        with pytest.raises(BadRequest, match="cannot be updated"):
            llm.update_weights(tmp_path)


def test_missing_layer_is_reported(tmp_path: Path) -> None:
    written(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"hidden_size": 32, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        LLM(str(tmp_path), backend="reference", **SETTINGS)


def test_other_models_do_not_classify() -> None:
    with closing(LLM("fake", backend="null")) as llm, pytest.raises(BadRequest, match="no classification layer"):
        llm.classify("a")
    with live() as server:
        assert server.post("/v1/classify", {"input": "a"}).status == 400
