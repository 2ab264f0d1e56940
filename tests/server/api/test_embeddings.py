"""/v1/embeddings, /v1/score and /v1/rerank over the engine, with a tiny checkpoint and with the scripted model."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file

from fd_core.config import EngineConfig
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.clients.launch import open_client
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.contract import StepInput
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.models.arrays import step_input
from fd_core.testing.models.checkpoints import LONG_CASE, write_checkpoint
from tests.server.fakes import LiveServer, live
from tests.server.test_null_engine import null_client, wait_until_idle

PATH = "/v1/embeddings"
SETTINGS: dict[str, Any] = {
    "backend": "reference",
    "max_num_seqs": 3,
    "num_kv_blocks": 80,
    "block_size": 16,
    "max_model_len": 512,
    "max_num_batched_tokens": 48,
}


def vector(folder: Path, ids: list[int], kind: str = "last") -> np.ndarray:
    """Compute the embedding from the model's hidden states, without an engine."""
    ops = NumpyOps()
    with open_checkpoint(folder) as checkpoint:
        model = load_model(checkpoint, ops)
    blocks = -(-len(ids) // 16)
    step = step_input([(len(ids), len(ids))], 16, np.arange(blocks, dtype=np.int32)[None])
    given = {name: getattr(step, name) for name in StepInput.__slots__} | {"token_ids": np.array(ids, np.int32)}
    states = model.states(StepInput(**given), ops.allocate_kv(model.kv_shape(16), blocks))
    found = states[-1] if kind == "last" else states.mean(axis=0)
    return found / np.linalg.norm(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(LONG_CASE, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    async def client() -> EngineClient:
        return await open_client(EngineConfig(model="tiny", **SETTINGS), folder, where="inproc")

    with live(client) as running:
        yield running


@pytest.fixture(scope="module")
def null() -> Iterator[LiveServer]:
    with live(null_client) as running:
        yield running


def test_embeddings_match_the_models_hidden_states(server: LiveServer, folder: Path) -> None:
    texts = ["a", "hello there", "x" * 300, *(f"text {index}" for index in range(9))]
    answer = server.post(PATH, {"input": texts}).json
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["id"].startswith("embd-")  # Mistral's client requires one
    assert abs(answer["created"] - time.time()) < 600
    assert [each["index"] for each in answer["data"]] == list(range(len(texts)))
    for text, each in zip(texts, answer["data"], strict=True):
        np.testing.assert_allclose(each["embedding"], vector(folder, list(text.encode())), atol=1e-5)
    assert answer["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, texts)))


def test_openai_client_parses_embeddings(server: LiveServer, folder: Path) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    right = vector(folder, [1, 2, 300])
    # Base64 is the default of the client.
    for options in ({}, {"encoding_format": "float"}):
        (found,) = client.embeddings.create(model="tiny", input=[1, 2, 300], **options).data  # type: ignore[call-overload]
        np.testing.assert_allclose(found.embedding, right, atol=1e-5)
    (cut,) = client.embeddings.create(model="tiny", input="abc", dimensions=8).data
    whole = vector(folder, list(b"abc"))[:8]
    np.testing.assert_allclose(cut.embedding, whole / np.linalg.norm(whole), atol=1e-5)


def test_base64_holds_float32(server: LiveServer) -> None:
    body = {"input": [[1, 2], [3]]}
    numbers = [each["embedding"] for each in server.post(PATH, body).json["data"]]
    packed = [each["embedding"] for each in server.post(PATH, {**body, "encoding_format": "base64"}).json["data"]]
    found = [np.frombuffer(base64.b64decode(each), "<f4") for each in packed]
    # The prompts may share a step in one of the requests and not in the other.
    np.testing.assert_allclose(found, np.array(numbers, np.float32), atol=1e-6)


def test_score_is_the_cosine_of_two_embeddings(server: LiveServer, folder: Path) -> None:
    one, others = "which", ["this", "that", "which"]
    right = [float(vector(folder, list(one.encode())) @ vector(folder, list(each.encode()))) for each in others]
    for body in ({"text_1": one, "text_2": others}, {"queries": [one] * 3, "documents": others}):
        answer = server.post("/v1/score", body).json
        assert [each["score"] for each in answer["data"]] == pytest.approx(right, abs=1e-5)
    assert right[2] == pytest.approx(1.0)


def test_rerank_returns_the_best_first(server: LiveServer) -> None:
    body = {"query": "which", "documents": ["this", {"text": "which"}, "that"]}
    results = server.post("/v1/rerank", body).json["results"]
    assert (results[0]["index"], results[0]["document"]) == (1, {"text": "which"})
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)
    best = server.post("/rerank", {**body, "top_n": 1, "return_documents": False}).json["results"]
    assert best == [{"index": 1, "relevance_score": scores[0]}]


def test_as_many_documents_as_are_allowed_are_ranked(null: LiveServer) -> None:
    body = {"query": "a", "documents": [f"document {number}" for number in range(2048)], "return_documents": False}
    assert len(null.post("/v1/rerank", body).json["results"]) == 2048
    assert null.post("/v1/rerank", {**body, "documents": [*body["documents"], "b"]}).status == 400


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (PATH, {"input": ""}, "input", "empty"),
        (PATH, {"input": []}, "input", "empty"),
        (PATH, {"input": ["a"] * 2049}, "input", "2048"),
        (PATH, {"input": [1031]}, "input", "1031"),
        (PATH, {"input": "a" * 512}, "input", "at most 511"),
        (PATH, {"input": ["a", "b", "a" * 512]}, "input[2]", "at most 511"),
        (PATH, {"input": ["a", ""]}, "input[1]", "empty"),
        (PATH, {"input": "a", "dimensions": 65}, "dimensions", "64 elements"),
        (PATH, {"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        (PATH, {"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        (PATH, {"input": "a", "stream": True}, "stream", "streamed"),
        ("/v1/score", {"text_1": "a"}, "text_2", "either"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2", "equal numbers"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction", "models that judge by it"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", ">= 1"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "truncate": True}, "truncate", "truncate_prompt_tokens"),
        (PATH, {"input": "a", "truncate_prompt_tokens": 512}, "truncate_prompt_tokens", "1 to 511, or -1"),
        (PATH, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 to 511, or -1"),
        (PATH, {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ">= -1"),
    ],
)
def test_unreadable_input_is_rejected_by_name(
    server: LiveServer, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    answer = server.post(path, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert words in answer.json["error"]["message"]


def test_many_embeddings_and_generations_share_the_engine(null: LiveServer) -> None:
    found = null.post(PATH, {"input": [f"text {index}" for index in range(300)]}).json
    assert {each["embedding"][0] for each in found["data"]} == {1.0}
    assert null.post("/v1/completions", {"prompt": "a", "max_tokens": 3}).status == 200
    wait_until_idle(null)


def test_pooling_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    """As written by sentence-transformers: no output projection, names without `model.`; unnormalized mean."""
    folder = write_checkpoint("llama-llama3-rope", tmp_path)
    plain = vector(folder, [1, 2, 3], "mean")
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaModel"]}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    modules = [
        {"idx": i, "path": p, "type": f"sentence_transformers.models.{n}"}
        for i, (n, p) in enumerate((("Transformer", ""), ("Pooling", "1_Pooling")))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))

    async def client() -> EngineClient:
        return await open_client(EngineConfig(model="st", **SETTINGS | {"max_model_len": 256}), folder, where="inproc")

    with live(client) as running:
        found = np.array(running.post(PATH, {"input": [1, 2, 3]}).json["data"][0]["embedding"])
        assert abs(np.linalg.norm(found) - 1) > 0.1
        np.testing.assert_allclose(found / np.linalg.norm(found), plain, atol=1e-5)
        refused = running.post("/v1/completions", {"prompt": "a"})
        assert (refused.status, refused.json["error"]["code"]) == (400, "no_texts")


def test_pair_classifier_returns_the_probability_of_yes(tmp_path: Path) -> None:
    folder = write_checkpoint(LONG_CASE, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"classifier_from_token": ["n", "y"]}))

    async def client() -> EngineClient:
        return await open_client(EngineConfig(model="judge", **SETTINGS), folder, where="inproc")

    with live(client) as running:
        documents = ["one", "another"]
        scores = running.post("/v1/score", {"text_1": "q", "text_2": documents, "instruction": "I"}).json["data"]
        for document, found in zip(documents, scores, strict=True):
            prompt = (
                "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
                'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
                f"<Instruct>: I\n<Query>: q\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
                "<think>\n\n</think>\n\n"
            )
            body = {"prompt": prompt, "max_tokens": 1, "logit_bias": {}, "logprobs": 1, "temperature": 0, "echo": True}
            completions = [
                running.post("/v1/completions", {**body, "prompt": [*prompt.encode(), token]}).json
                for token in (b"n"[0], b"y"[0])
            ]
            no, yes = (each["choices"][0]["logprobs"]["token_logprobs"][-2] for each in completions)
            assert found["score"] == pytest.approx(1 / (1 + np.exp(no - yes)), abs=1e-4)
