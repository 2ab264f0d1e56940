"""Vectors of encoders equal those of transformers, and do not depend on the batch."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fd_core import LLM
from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.clients.launch import open_client
from fd_core.errors import BadRequest, ConfigError, ModelError
from fd_core.models.loading.tokenizer_source import read_tokenizer_folder
from fd_core.models.loading.vector_settings import read_vector_settings
from fd_core.ops.numpy.ops import NumpyOps
from tests.server.fakes import live

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.models.encoders.small import CONFIGS, pooled_by, states_of, written  # noqa: E402

LENGTHS = (1, 7, 200, 64, 130, 2, 33)
PACKS: dict[str, dict[str, Any]] = {
    "numpy": {"backend": "reference"},
    "native": {"backend": "cpu"},
    "torch": {"backend": "cpu", "native_kernels": False},
}


def prompts() -> list[list[int]]:
    """Return texts of token ids of uneven lengths."""
    rng = np.random.default_rng(7)
    return [rng.integers(5, 300, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize("name", CONFIGS)
def test_vectors_equal_transformers(tmp_path: Path, name: str) -> None:
    model = written(tmp_path, name)
    pooled_by(tmp_path, "cls_token" if name == "roberta" else "mean_tokens")
    states = [states_of(model, ids) for ids in prompts()]
    right = [(each[0] if name == "roberta" else each.mean(0)).numpy() for each in states]
    for pack, settings in PACKS.items():
        with closing(LLM(str(tmp_path), dtype="float32", max_num_batched_tokens=256, **settings)) as llm:
            found = llm.embed(prompts())
            np.testing.assert_allclose(found, right, atol=1e-5, err_msg=pack)
            if pack == "native":
                np.testing.assert_array_equal(found, np.concatenate([llm.embed([each]) for each in prompts()]))


def test_long_text_takes_a_whole_step(tmp_path: Path) -> None:
    written(tmp_path, "bert")
    longest = [[7] * 220]
    with closing(LLM(str(tmp_path), backend="reference", max_num_seqs=4)) as llm:
        whole = llm.embed(longest)
        with pytest.raises(BadRequest, match="context length"):
            llm.embed([[7] * 221])
    with closing(LLM(str(tmp_path), backend="reference", max_num_batched_tokens=100)) as llm:
        assert llm.embed([[7] * 100]).shape == whole.shape
        with pytest.raises(BadRequest, match="context length"):
            llm.embed([[7] * 101])
    with pytest.raises(ConfigError, match="less than a text of 219 tokens"):
        LLM(str(tmp_path), backend="reference", max_num_batched_tokens=100, max_model_len=220)


def test_longest_text_is_that_of_the_authors_unless_a_setting_allows_more(tmp_path: Path) -> None:
    written(tmp_path, "bert")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 50}')
    with closing(LLM(str(tmp_path), backend="reference")) as llm:
        assert len(llm.embed([[7] * 50])) == 1
        with pytest.raises(BadRequest, match="context length"):
            llm.embed([[7] * 51])
    with closing(LLM(str(tmp_path), backend="reference", max_model_len=101)) as llm:
        assert len(llm.embed([[7] * 100])) == 1
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": ')
    with pytest.raises(ModelError, match=r"sentence_bert_config\.json"):
        LLM(str(tmp_path), backend="reference")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 4096}')
    with closing(LLM(str(tmp_path), backend="reference")) as llm:
        assert len(llm.embed([[7] * 220])) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_store": "memory:"},
        {"role": "decode"},
        {"kv_cache_dtype": "int8"},
        {"lora_folder": "."},
        {"pipeline_parallel_size": 2},
        {"speculative": SpeculativeConfig(method="ngram")},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_setting_of_generation_is_refused_by_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    written(tmp_path, "bert")
    with pytest.raises(ConfigError, match=r"is an encoder.*does not apply"):
        load_engine(EngineConfig(model="m", backend="reference", **settings), tmp_path, progress=lambda *_: None)


def test_ranks_compute_the_same_vectors(tmp_path: Path) -> None:
    written(tmp_path, "modernbert")
    settings: dict[str, Any] = {"backend": "cpu", "dtype": "float32", "num_threads": 1}
    with closing(LLM(str(tmp_path), **settings)) as llm:
        alone = llm.embed(prompts())
    with closing(LLM(str(tmp_path), tensor_parallel_size=2, **settings)) as llm:
        np.testing.assert_array_equal(llm.embed(prompts()), alone)


@pytest.mark.parametrize("where", ["inproc", pytest.param("process", marks=pytest.mark.soak)])
def test_vectors_follow_sleep_and_updates_of_weights(tmp_path: Path, where: Literal["inproc", "process"]) -> None:
    written(tmp_path / "first", "bert")
    written(tmp_path / "weights" / "second", "bert", seed=1)
    config = EngineConfig(model="m", backend="reference", weights_folder=str(tmp_path / "weights"))

    def vector() -> list[float]:
        answer = server.post("/v1/embeddings", {"input": prompts()[1]})
        assert answer.status == 200, answer.json
        return list(answer.json["data"][0]["embedding"])

    with live(partial(open_client, config, tmp_path / "weights" / "second", where=where)) as server:
        second = vector()
    with live(partial(open_client, config, tmp_path / "first", where=where)) as server:
        first = vector()
        assert server.post("/v1/sleep?level=2", {}).status == 200
        assert server.post("/v1/wake_up", {}).status == 200
        assert vector() == first != second
        assert server.post("/v1/update_weights", {"model_path": "second"}).status == 200
        assert vector() == second


def test_declared_prompts_precede_texts(tmp_path: Path) -> None:
    written(tmp_path, "bert")
    pooled_by(tmp_path, "mean_tokens")
    declared = tmp_path / "config_sentence_transformers.json"
    prompts = {"query": "find: ", "document": "text: "}
    declared.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "document"}))
    config = EngineConfig(model="m", backend="reference")
    with closing(LLM(str(tmp_path), backend="reference")) as llm:
        ids = {text: llm.tokenizer.encode(text) for text in ("find: a", "text: a")}
        np.testing.assert_array_equal(llm.embed("a"), llm.embed([ids["text: a"]]))
        np.testing.assert_array_equal(llm.embed("a", prompt_name="query"), llm.embed([ids["find: a"]]))
        with pytest.raises(BadRequest, match="query, document"):
            llm.embed("a", prompt_name="other")
        tokenizer = llm.tokenizer

    with live(partial(open_client, config, tmp_path, where="inproc"), tokenizer=tokenizer) as server:

        def vector(given: Any, **more: Any) -> list[float]:
            return list(server.post("/v1/embeddings", {"input": given, **more}).json["data"][0]["embedding"])

        assert vector("a") == vector(["a"]) == vector(ids["text: a"])
        assert vector("a", prompt_name="query") == vector([ids["find: a"]])
        name = server.get("/v1/models").json["data"][0]["id"]
        ollama = server.post("/api/embed", {"model": name, "input": "a"}).json["embeddings"][0]
        np.testing.assert_allclose(ollama, np.array(vector("a")) / np.linalg.norm(vector("a")), atol=1e-6)
        refused = server.post("/v1/embeddings", {"input": "a", "prompt_name": "other"})
        assert (refused.status, refused.error["param"]) == (400, "prompt_name")
        assert "query, document" in refused.error["message"]
    for other in ({"prompts": ["a"]}, {"prompts": prompts, "default_prompt_name": "other"}, {"truncate_dim": 8}):
        declared.write_text(json.dumps(other))
        with pytest.raises(ModelError, match="config_sentence_transformers"):
            LLM(str(tmp_path), backend="reference")
    declared.write_text(json.dumps({"prompts": prompts}))
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true, "include_prompt": false}')
    with pytest.raises(ModelError, match="include_prompt"):
        LLM(str(tmp_path), backend="reference")


def test_settings_of_texts_and_outputs_are_followed_or_refused(tmp_path: Path) -> None:
    written(tmp_path, "bert")
    pooled_by(tmp_path, "mean_tokens")
    settings = tmp_path / "sentence_bert_config.json"
    plain = read_tokenizer_folder(tmp_path)
    settings.write_text('{"do_lower_case": true}')
    assert read_tokenizer_folder(tmp_path).digest != plain.digest
    with closing(LLM(str(tmp_path), backend="reference")) as llm:
        np.testing.assert_array_equal(llm.embed("Hello"), llm.embed("hello"))
    settings.write_text('{"modality_config": {"text": {"method_output_name": "pooler_output"}}}')
    with pytest.raises(ModelError, match="output 'pooler_output' of the model is not served"):
        LLM(str(tmp_path), backend="reference")
    settings.unlink()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": ["cls", "mean"]}')
    with pytest.raises(ModelError, match="pooling by cls and mean"):
        LLM(str(tmp_path), backend="reference")


def test_update_of_a_model_with_dense_modules_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "m", "distilbert")
    dense = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
    pooled_by(tmp_path / "m", "mean_tokens", dense)
    save_file({"linear.weight": np.ones((5, 64), np.float32)}, tmp_path / "m" / "2_Dense" / "model.safetensors")
    config = EngineConfig(model="m", backend="reference", weights_folder=str(tmp_path))
    with live(partial(open_client, config, tmp_path / "m", where="inproc")) as server:
        assert len(server.post("/v1/embeddings", {"input": "a"}).json["data"][0]["embedding"]) == 5
        assert "Dense modules" in server.post("/v1/update_weights", {"model_path": "m"}).error["message"]


def test_pack_without_encoders_refuses_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "bert")
    monkeypatch.setattr(NumpyOps, "encodes", False)
    with pytest.raises(ConfigError, match="the numpy pack does not compute encoders, which BertModel needs"):
        LLM(str(tmp_path), backend="reference")


def test_names_of_old_files_are_read(tmp_path: Path) -> None:
    """They have the prefix of an output layer, and norms of other names."""
    written(tmp_path, "bert")
    with closing(LLM(str(tmp_path), backend="reference")) as llm:
        right = llm.embed(prompts())
    file = tmp_path / "model.safetensors"
    tensors = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma"): each for name, each in load_file(file).items()
    }
    save_file({name.replace("LayerNorm.bias", "LayerNorm.beta"): each for name, each in tensors.items()}, file)
    with closing(LLM(str(tmp_path), backend="reference")) as llm:
        np.testing.assert_array_equal(llm.embed(prompts()), right)


def test_a_module_that_is_not_served_is_refused_with_those_that_are(tmp_path: Path) -> None:
    pooled_by(tmp_path, "mean", {"type": "sentence_transformers.models.LSTM", "path": "2_LSTM"})
    with pytest.raises(ModelError, match="'LSTM' is not served") as caught:
        read_vector_settings(tmp_path, 64)
    assert caught.value.hint == "served are Transformer, Pooling, then Dense, then Normalize"
