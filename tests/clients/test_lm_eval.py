"""lm-evaluation-harness: its results over HTTP equal those with transformers on the same file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fd_core.models.catalog import resolve_model
from tests.server.processes import serving

os.environ["HF_HUB_OFFLINE"] = "1"
lm_eval = pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")

QUESTIONS = [
    {"q": "What is the capital of France?", "choices": ["Paris", "Rome", "a small town"], "gold": 0},
    {"q": "How many legs has a spider?", "choices": ["four", "six", "eight"], "gold": 2},
    {"q": "Was ist größer, ein Haus oder ein Hund?", "choices": ["ein Haus", "日本"], "gold": 0},
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Write tasks with multiple choice, whole-text likelihood and generation."""
    data = tmp_path_factory.mktemp("task") / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    question = "Question: {{q}}\nAnswer:"
    choosing = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}"}
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_target": "{{q}} {{choices[gold]}}"}
    writing = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n", "Question:"], "temperature": 0.0, "do_sample": False, "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    }
    return [
        {"task": "choosing", "doc_to_text": question, **shared, **choosing},
        {"task": "rolling", "doc_to_text": "", **shared, **rolling},
        {"task": "writing", "doc_to_text": question, **shared, **writing},
    ]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    # Native kernels quantize activations to 8 bits before packed weights, which transformers does not.
    options = ("--max-num-seqs", "4", "--max-model-len", "1024", "--dtype", "float32", "--no-native-kernels")
    with serving(log, "smollm2", *options, "--enable-tokenizer-info-endpoint") as server:
        yield server.url


def measured(tasks: list[dict[str, Any]], kind: str, /, **arguments: Any) -> dict[str, list[Any]]:
    """Return the model's result in each task: log-likelihoods and whether they are greedy, or texts."""
    results = lm_eval.simple_evaluate(kind, arguments, tasks=tasks, device="cpu", bootstrap_iters=0, log_samples=True)
    return {
        task: [answer for sample in samples for answer in sample["filtered_resps"]]
        for task, samples in results["samples"].items()
    }


@pytest.fixture(scope="module")
def expected(tasks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    file = Path(resolve_model("smollm2").path)
    return measured(tasks, "hf", pretrained=str(file.parent), gguf_file=file.name, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the model's tokenizer, read by transformers."""
    file, folder = Path(resolve_model("smollm2").path), tmp_path_factory.mktemp("tokenizer")
    transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)
    return str(folder)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["remote", "huggingface"])
def test_harness_results_equal_those_of_transformers(
    url: str, tasks: list[dict[str, Any]], expected: dict[str, list[Any]], tokenizer: str, backend: str
) -> None:
    # The harness detects the server's tokenizer by itself unless it is given one.
    own = {} if backend == "remote" else {"tokenizer_backend": backend, "tokenizer": tokenizer}
    address = f"{url}/v1/completions"
    found = measured(tasks, "local-completions", model="smollm2", base_url=address, num_concurrent=2, **own)
    for (score, greedy), (right, is_greedy) in zip(found["choosing"], expected["choosing"], strict=True):
        assert score == pytest.approx(right, abs=2e-3)
        assert greedy == is_greedy
    assert found["rolling"] == pytest.approx(expected["rolling"], abs=2e-3)
    assert found["writing"] == expected["writing"]


@pytest.mark.timeout(600)
def test_chat_requests_are_answered(url: str, tasks: list[dict[str, Any]]) -> None:
    address = f"{url}/v1/chat/completions"
    writing = tasks[2:]
    results = lm_eval.simple_evaluate(
        "local-chat-completions", {"model": "smollm2", "base_url": address}, tasks=writing, apply_chat_template=True
    )
    assert all(sample["resps"][0][0] for sample in results["samples"]["writing"])
