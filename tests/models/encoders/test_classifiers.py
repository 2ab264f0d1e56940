"""Classes and scores of encoders equal those of transformers, in Python and over HTTP."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core import LLM
from fd_core.config import EngineConfig
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.clients.launch import open_client
from fd_core.errors import BadRequest, ModelError
from fd_core.models.opening import open_checkpoint
from fd_core.text.tokenizer import load_tokenizer
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


def test_cross_encoder_of_sentence_transformers_is_served(tmp_path: Path) -> None:
    model = written(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    files: dict[str, Any] = {
        "modules": [{"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}],
        "sentence_bert_config": {"modality_config": {"text": {"method_output_name": "logits"}}},
        "config_sentence_transformers": {"model_type": "CrossEncoder", "activation_fn": "torch.nn.Identity"},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    with closing(LLM(str(tmp_path), **SETTINGS)) as llm:
        right = [output(model, llm.tokenizer.backend, "a question", text).item() for text in TEXTS]
        np.testing.assert_allclose(llm.score("a question", TEXTS), right, atol=1e-5)
    declared = tmp_path / "config_sentence_transformers.json"
    for more, words in (({"activation_fn": "torch.nn.Tanh"}, "Tanh"), ({"model_type": "Other"}, "'logits'")):
        declared.write_text(json.dumps(files["config_sentence_transformers"] | more))
        with pytest.raises(ModelError, match=words):
            LLM(str(tmp_path), **SETTINGS)


@pytest.mark.parametrize("size", [4, 7, 12, 30])
def test_truncated_texts_are_those_of_the_library(tmp_path: Path, size: int) -> None:
    written(tmp_path, "bert")
    with closing(LLM(str(tmp_path), **SETTINGS)) as llm:
        backend, tokenizer = llm.tokenizer.backend, llm.tokenizer
        assert len(backend.encode(TEXTS[1]).ids) > size
    for text in ("", *TEXTS, ("a question", TEXTS[1]), (TEXTS[1], "a question"), (TEXTS[1], TEXTS[1])):
        given = [text] if isinstance(text, str) else text
        found = [tokenizer.encode(text, special, longest=size, second_text=300) for special in (True, False)]
        backend.enable_truncation(size)
        right = [backend.encode(*given, add_special_tokens=special) for special in (True, False)]
        backend.no_truncation()
        assert found == [[of + 300 * kind for of, kind in zip(each.ids, each.type_ids, strict=True)] for each in right]
    with pytest.raises(BadRequest, match="adds 2 tokens"):
        tokenizer.encode("a", longest=2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["x" * 400]}),
        ("/v1/embeddings", {"input": [7] * 400}),
        ("/pooling", {"input": "x" * 400}),
        ("/classify", {"input": "x" * 400}),
        ("/score", {"text_1": "a", "text_2": "x" * 400}),
        ("/rerank", {"query": "a", "documents": ["x" * 400]}),
    ],
)
def test_long_texts_are_truncated_on_request(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    written(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    with open_checkpoint(tmp_path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    with live(client_of(tmp_path), tokenizer=tokenizer) as server:
        assert server.post(path, body).status == 400
        for asked, left in ((-1, 220), (50, 50)):
            answer = server.post(path, body | {"truncate_prompt_tokens": asked}).json
            assert answer["usage"]["prompt_tokens"] == left


def client_of(folder: Path) -> Any:
    async def client() -> EngineClient:
        return await open_client(EngineConfig(model="m", **SETTINGS), folder, where="inproc")

    return client
