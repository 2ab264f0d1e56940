"""Classes and scores of encoders equal those of transformers, in Python and over HTTP."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core import LLM
from fd_core.config import EngineConfig
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.clients.launch import open_client
from fd_core.errors import BadRequest
from tests.server.fakes import live

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.encoders.small import CONFIGS, written  # noqa: E402

TEXTS = ["hello", "a longer text about nothing at all", "x" * 70]
SETTINGS: dict[str, Any] = {"backend": "cpu", "dtype": "float32"}
WITH_CLASSES = [name for name in CONFIGS if name != "embeddinggemma"]


def output(model: Any, tokenizer: Any, text: str, second: str | None = None) -> Any:
    found = tokenizer.encode(text, second)
    types = getattr(model.config, "type_vocab_size", 1)
    more = {"token_type_ids": torch.tensor([found.type_ids])} if types > 1 else {}
    with torch.no_grad():
        return model(torch.tensor([found.ids]), **more).logits[0]


@pytest.mark.parametrize("name", WITH_CLASSES)
def test_classes_equal_transformers(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, name, "ForSequenceClassification", num_labels=3)
    with closing(LLM(str(tmp_path), **SETTINGS)) as llm:
        found = [output(model, llm.tokenizer.backend, text) for text in TEXTS]
        np.testing.assert_allclose(llm.classify(TEXTS), [torch.softmax(each, 0) for each in found], atol=1e-5)
        with pytest.raises(BadRequest, match="cannot generate text"):
            llm.generate("a")


@pytest.mark.parametrize("name", WITH_CLASSES)
def test_classes_of_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, name, "ForTokenClassification", num_labels=3)
    with closing(LLM(str(tmp_path), **SETTINGS)) as llm:
        right = [torch.softmax(output(model, llm.tokenizer.backend, text), 1).numpy() for text in TEXTS]
        for found, expected in zip(llm.classify_tokens(TEXTS), right, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)
        with pytest.raises(BadRequest, match="classifies tokens"):
            llm.classify(TEXTS)

    with live(client_of(tmp_path), tokenizer=llm.tokenizer) as server:
        answer = server.post("/pooling", {"input": TEXTS}).json
        for each, expected in zip(answer["data"], right, strict=True):
            np.testing.assert_allclose(each["data"], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_scores_of_pairs_equal_transformers(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, name, "ForSequenceClassification", num_labels=1)
    with closing(LLM(str(tmp_path), **SETTINGS)) as llm:
        right = [torch.sigmoid(output(model, llm.tokenizer.backend, "a question", text)).item() for text in TEXTS]
        np.testing.assert_allclose(llm.score("a question", TEXTS), right, atol=1e-5)

    with live(client_of(tmp_path), tokenizer=llm.tokenizer) as server:
        answer = server.post("/v1/score", {"text_1": "a question", "text_2": TEXTS}).json
        np.testing.assert_allclose([each["score"] for each in answer["data"]], right, atol=1e-5)
        ranked = server.post("/rerank", {"query": "a question", "documents": TEXTS}).json["results"]
        assert [each["index"] for each in ranked] == np.argsort(-np.array(right)).tolist()


def client_of(folder: Path) -> Any:
    async def client() -> EngineClient:
        return await open_client(EngineConfig(model="m", **SETTINGS), folder, where="inproc")

    return client
