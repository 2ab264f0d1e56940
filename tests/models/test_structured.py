"""A real model fills schemas: every output is complete, valid, and equal in any batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest

from fd_core import LLM, SamplingParams
from fd_core.config import SpeculativeConfig
from fd_core.engine.llm import Completion
from fd_core.errors import ModelError
from fd_core.models.catalog import resolve_model
from fd_core.structured import grammar
from fd_core.types import FinishReason
from tests.models.schemas import TEN
from tests.models.test_smollm2 import network_is_there

SETTINGS: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 320, "num_kv_blocks": 160, "block_size": 16}


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    try:
        resolve_model("smollm2")
    except ModelError as error:
        if network_is_there():
            raise
        pytest.skip(f"no network: {error}")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM("smollm2", backend="cpu", dtype="float32", **SETTINGS)
    yield made
    made.close()


def fill(llm: LLM, names: list[str], seeds: Sequence[int], **params: Any) -> list[Completion]:
    prompts = [f"An example of a {name}, as JSON:\n" for name in names for _ in seeds]
    parameters = [
        SamplingParams(max_tokens=160, temperature=1.0, seed=seed, grammar=grammar.json_schema(TEN[name]), **params)
        for name in names
        for seed in seeds
    ]
    filled = llm.generate(prompts, parameters)
    for index, answer in enumerate(filled):
        assert answer.finish_reason is FinishReason.STOP, answer.text
        jsonschema.validate(json.loads(answer.text), TEN[names[index // len(seeds)]])
    return filled


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_ten_schemas_are_always_filled_validly(llm: LLM, times: int) -> None:
    fill(llm, list(TEN), range(times))
    masks = llm.stats.masks
    assert masks is not None
    assert masks.forced_accepted == masks.forced_drafted > masks.masks / 4, "much of a schema is forced"


@pytest.mark.soak  # the default run has tests/engine/test_structured.py and tiny models
@pytest.mark.law("4")
def test_texts_are_equal_alone_with_drafts_and_preempted(llm: LLM) -> None:
    names = ["records", "unicode"]
    together = [answer.token_ids for answer in fill(llm, names, range(2))]
    alone = [fill(llm, [name], [seed])[0].token_ids for name in names for seed in range(2)]
    assert alone == together
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    for settings in ({"num_kv_blocks": 20, "pipeline_depth": 2, "max_forced_tokens": 0}, {"speculative": ngram}):
        other = LLM("smollm2", backend="cpu", dtype="float32", **SETTINGS | settings)
        assert [answer.token_ids for answer in fill(other, names, range(2))] == together, settings
        other.close()


@pytest.mark.soak
@pytest.mark.law("4")
def test_backends_generate_equal_texts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, grammar=grammar.choice(["a cat", "a car", "a dog"]))
    result = llm.generate("I saw ", params)[0]
    oracle = LLM("smollm2", backend="reference", max_num_seqs=1, max_model_len=64, num_kv_blocks=4)
    assert oracle.generate("I saw ", params)[0].token_ids == result.token_ids
    assert result.text in ("a cat", "a car", "a dog")
    oracle.close()
