"""Texts of models that `transformers` computes depend on nothing but the request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fd_core import LLM
from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.testing.models.texts import run
from fd_core.types import RequestSpec, SamplingParams
from tests.models.fallback.written import TOKENS, logits_of, write
from tests.server.fakes import byte_tokenizer

NAMES = ("GPTJ", "Ministral", "MiniMaxM2")
Texts = dict[str, list[int]]


def engine_of(folder: Path, **settings: Any) -> Engine:
    values: dict[str, Any] = {
        "model": str(folder),
        "backend": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "max_num_seqs": 6,
        "block_size": 4,
        "num_kv_blocks": 300,
        "max_model_len": 160,
        "max_num_batched_tokens": 48,
        "structured_output": False,
    }
    return load_engine(EngineConfig(**values | settings), folder, progress=lambda *_: None, wake=lambda: None)


def specs() -> list[RequestSpec]:
    """Return requests of which half share a prefix, greedy and sampled, and with log-probabilities."""
    rng = np.random.default_rng(1)
    shared = tuple(rng.integers(3, TOKENS, 24).tolist())
    return [
        RequestSpec(
            request_id=f"r{index}",
            prompt=(shared if index % 2 else ()) + tuple(rng.integers(3, TOKENS, int(rng.integers(1, 40))).tolist()),
            params=SamplingParams(
                max_tokens=40,
                ignore_eos=True,
                temperature=float(index % 3 == 1),
                seed=index,
                logprobs=2 if index % 3 == 0 else None,
                prompt_logprobs=1 if index == 4 else None,
            ),
        )
        for index in range(10)
    ]


@pytest.fixture(scope="module", params=NAMES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Texts]]:
    """Return a checkpoint, and the texts of requests that are alone."""
    folder = tmp_path_factory.mktemp(request.param)
    write(request.param, folder)
    engine = engine_of(folder, max_num_seqs=1, max_num_batched_tokens=512, enable_prefix_caching=False)
    yield folder, {name: text for spec in specs() for name, text in run(engine, [spec]).tokens.items()}
    engine.close()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("budget", [9, 48])
@pytest.mark.in_turn(4)
def test_chunks_and_batches_do_not_change_texts(made: tuple[Path, Texts], budget: int, native: bool) -> None:
    with closing(engine_of(made[0], max_num_batched_tokens=budget, native_kernels=native)) as engine:
        assert run(engine, specs()).tokens == made[1]


def test_prefix_hits_do_not_change_texts(made: tuple[Path, Texts]) -> None:
    with closing(engine_of(made[0])) as engine:
        run(engine, specs())
        before = engine.stats().scheduler.counters.prefix_hits
        again = [msgspec.structs.replace(spec, request_id=f"{spec.request_id}, again") for spec in specs()]
        assert list(run(engine, again).tokens.values()) == list(made[1].values())
        assert engine.stats().scheduler.counters.prefix_hits - before > 100


@pytest.mark.parametrize("saved", [False, True])
def test_preemption_does_not_change_texts(made: tuple[Path, Texts], saved: bool) -> None:
    groups = LayerGroups(0, 1, window=6) if made[0].name.startswith("Ministral") else ONE_GROUP
    # With windows a request holds few blocks: three of them at their largest, and the begin of a fourth.
    blocks = 44 if groups == ONE_GROUP else 3 * groups.blocks(1000, 4) + 1
    with closing(engine_of(made[0], num_kv_blocks=blocks, save_preempted_kv=saved)) as engine:
        assert engine.info.groups == groups
        if groups != ONE_GROUP:
            engine.probe().scheduler.probe().control.growth = lambda *_: 0  # type: ignore[attr-defined]  # admits what fits
        assert run(engine, specs()).tokens == made[1]
        assert engine.stats().scheduler.counters.preemptions > 0, "the pool should run out"


def test_drafts_do_not_change_texts(made: tuple[Path, Texts]) -> None:
    drafting = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    with closing(engine_of(made[0], speculative=drafting)) as engine:
        assert run(engine, specs()).tokens == made[1]
        drafts = engine.stats().scheduler.drafts
        assert drafts.proposed > drafts.accepted > 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    """Return a model with a tokenizer of bytes, and its reference."""
    folder = tmp_path_factory.mktemp("helium")
    reference = write("Helium", folder, vocab_size=300)
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    with closing(LLM(str(folder), backend="cpu", dtype="float32", max_model_len=128, num_kv_blocks=64)) as llm:
        yield llm, reference


def test_grammar_determines_the_text(served: tuple[LLM, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    [found] = served[0].generate("hello", SamplingParams(max_tokens=30), schema=schema)
    assert json.loads(found.text)["a"] in (1, 2)


def test_vectors_are_those_of_transformers(served: tuple[LLM, Any]) -> None:
    llm, reference = served
    states = reference.model(input_ids=torch.tensor([list(b"hello")])).last_hidden_state[0, -1].detach().numpy()
    np.testing.assert_allclose(llm.embed("hello")[0], states / np.linalg.norm(states), atol=1e-5)


def test_prompt_scores_are_those_of_transformers(served: tuple[LLM, Any]) -> None:
    llm, reference = served
    [found] = llm.generate("hello", SamplingParams(max_tokens=1, prompt_logprobs=0))
    scores = torch.log_softmax(torch.from_numpy(logits_of(reference, list(b"hell"))), dim=1)
    right = scores[range(4), list(b"ello")]
    np.testing.assert_allclose([each.logprob for each in found.prompt_logprobs[1:]], right, atol=1e-4)


def test_updated_and_restored_weights_compute_their_own_texts(tmp_path: Path) -> None:
    model = write("Helium", tmp_path / "old", vocab_size=300)
    for parameter in model.parameters():
        parameter.data.mul_(1.3)
    model.save_pretrained(tmp_path / "new")
    for name in ("old", "new"):
        byte_tokenizer().backend.save(str(tmp_path / name / "tokenizer.json"))
    settings: dict[str, Any] = {"backend": "cpu", "dtype": "float32", "max_model_len": 64, "num_kv_blocks": 16}
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with closing(LLM(str(tmp_path / "new"), **settings)) as llm:
        right = llm.generate("hello", params)[0].token_ids
    with closing(LLM(str(tmp_path / "old"), weights_folder=str(tmp_path), **settings)) as llm:
        assert llm.generate("hello", params)[0].token_ids != right
        llm.update_weights(str(tmp_path / "new"))
        assert llm.generate("hello", params)[0].token_ids == right
        llm.sleep()
        llm.wake_up()
        assert llm.generate("hello", params)[0].token_ids == right
