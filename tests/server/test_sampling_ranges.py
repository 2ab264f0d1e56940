"""Ranges of sampling parameters are defined on `SamplingParams` alone, and hold for HTTP, `LLM` and command line."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from typer.testing import CliRunner

from fd_core import LLM, SamplingParams
from fd_core.cli.app import app
from fd_core.errors import BadRequest
from fd_core.server.schemas.requests import CompletionRequest
from fd_core.types.checks import check_sampling
from tests.server.fakes import LiveServer

OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("min_tokens", -1),
    ("temperature", 2.5),
    ("temperature", -0.1),
    ("top_p", -0.1),
    ("min_p", 1.5),
    ("presence_penalty", 3.0),
    ("frequency_penalty", -3.0),
    ("repetition_penalty", 1e-300),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
]
FROM_OTHER_FIELDS = {"grammar", "reasoning"}
"""Parameters that the server derives from fields with other names."""
OTHERWISE = {"max_tokens", "top_k", "seed", "stop_token_ids", "allowed_token_ids", "bad_words_token_ids"}
"""Parameters with more spellings in requests than in the engine; `logit_bias` has a separate test."""


def constraint(struct: type[Any], name: str) -> list[msgspec.Meta]:
    def metas(hint: Any) -> list[msgspec.Meta]:
        here = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, msgspec.Meta)]
        return here + [meta for each in get_args(hint) for meta in metas(each)]

    return metas(get_type_hints(struct, include_extras=True)[name])


def test_every_parameter_is_a_request_field_with_equal_range() -> None:
    fields = set(SamplingParams.__struct_fields__) - FROM_OTHER_FIELDS
    assert fields <= set(CompletionRequest.__struct_fields__)
    for name in fields - OTHERWISE:
        assert set(constraint(CompletionRequest, name)) == set(constraint(SamplingParams, name)), name
    assert {name for name, _ in OUT_OF_RANGE} == {
        name for name in fields - OTHERWISE - {"logit_bias"} if constraint(SamplingParams, name)
    }


def test_more_tokens_at_least_than_at_most_are_rejected() -> None:
    with pytest.raises(BadRequest, match="min_tokens=20 exceeds the 16 tokens that may be generated; raise max_tokens"):
        check_sampling(SamplingParams(min_tokens=20))
    check_sampling(SamplingParams(min_tokens=16))


@pytest.mark.parametrize("name, value", OUT_OF_RANGE)
def test_http_and_python_reject_with_the_same_message(server: LiveServer, name: str, value: Any) -> None:
    error = server.post("/v1/completions", {"prompt": "a", name: value}).error
    with pytest.raises(BadRequest) as caught:
        check_sampling(SamplingParams(**{name: value}))
    assert (caught.value.message, caught.value.field) == (error["message"], error["param"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_are_rejected(value: float) -> None:
    with pytest.raises(BadRequest, match=f"temperature: expected a finite number, got {value}"):
        check_sampling(SamplingParams(temperature=value))


@pytest.mark.parametrize(
    "params, field",
    [
        (SamplingParams(seed=-1), "seed"),
        (SamplingParams(seed=2**64), "seed"),
        (SamplingParams(top_k=-1), "top_k"),
        (SamplingParams(logit_bias={3: 101.0}), "logit_bias[...]"),
        (SamplingParams(logit_bias={257: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids"),
        (SamplingParams(allowed_token_ids=(1, 257)), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=()), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=(3,), bad_words_token_ids=((3,),)), "allowed_token_ids"),
        (SamplingParams(bad_words_token_ids=((1, -1),)), "bad_words_token_ids"),
        (SamplingParams(bad_words_token_ids=((),)), "bad_words_token_ids"),
    ],
)
def test_ids_and_seeds_are_checked_too(params: SamplingParams, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_sampling(params, vocab_size=257)
    assert caught.value.field == field


def test_python_engine_rejects_parameters_out_of_range() -> None:
    llm = LLM("null", backend="null")
    try:
        with pytest.raises(BadRequest, match=r"temperature: expected `float` <= 2\.0"):
            llm.generate([[1], [2]], [SamplingParams(max_tokens=1), SamplingParams(temperature=9.0)])
        assert llm.stats.scheduler.slots.waiting == 0, "nothing was submitted"
        with pytest.raises(BadRequest, match="stop_token_ids: token id"):
            llm.generate([[1]], SamplingParams(stop_token_ids=(10**6,)))
    finally:
        llm.close()


@pytest.mark.parametrize(
    "flag, value", [("--temperature", "3"), ("--top-p", "1.5"), ("--max-tokens", "0"), ("--seed", "-1")]
)
def test_command_line_names_the_flag(flag: str, value: str) -> None:
    result = CliRunner().invoke(app, ["complete", "x", flag, value], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"{flag}: " in result.output


def test_guide_names_at_most_six_files_and_they_exist() -> None:
    root = Path(__file__).parents[2]
    guide = (root / "docs" / "extend" / "add-a-sampling-parameter.md").read_text()
    files = re.findall(r"^\d\. `([^`]+)`:", guide, re.MULTILINE)
    assert 1 <= len(files) <= 6
    assert [file for file in files if not (root / file).is_file()] == []
