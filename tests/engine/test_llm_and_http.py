"""`LLM` and the HTTP API accept the same requests."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import pytest

from fd_core import LLM, AsyncLLM, SamplingParams
from fd_core.errors import FdError
from fd_core.server.preprocess.sampling import sampling_params
from fd_core.server.schemas.requests import ChatRequest, CompletionRequest
from fd_core.text.chat_template import ChatTemplate
from fd_core.types.checks import check_sampling

DIFFERENT = {
    ("max_tokens", 0): "an echoed prompt without a text is of HTTP alone",
    ("top_k", -1): "0 alone keeps all tokens",
    ("allowed_token_ids", ()): "None alone allows all tokens",
}
"""Values that the HTTP API accepts and `SamplingParams` rejects, with the reason."""
NAMES = {"chat_template_kwargs": "template_kwargs"}
"""Arguments of `LLM.chat`, and the names that `ChatTemplate.render` has for them."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("null", backend="null", num_kv_blocks=40, max_model_len=64) as found:
        yield found


def shared_fields() -> list[str]:
    fields = {field.name for field in msgspec.structs.fields(CompletionRequest)}
    return [name for name in SamplingParams.__struct_fields__ if name in fields and name != "grammar"]


def values_of(annotation: Any) -> set[Any]:
    """Return the limits that a type states, and values just beyond them."""
    found: set[Any] = set()
    if typing.get_origin(annotation) is Annotated:
        for meta in annotation.__metadata__:
            for limit in (getattr(meta, "ge", None), getattr(meta, "le", None)):
                found |= set() if limit is None else {limit, limit - 1, limit + 1}
    for part in typing.get_args(annotation):
        found |= values_of(part) if typing.get_origin(part) else set()
    return found | {()} if typing.get_origin(annotation) in (tuple, list) else found


@pytest.mark.parametrize("field", shared_fields())
def test_sampling_parameters_have_the_limits_of_http(llm: LLM, field: str) -> None:
    hints = [typing.get_type_hints(each, include_extras=True)[field] for each in (SamplingParams, CompletionRequest)]
    for value in sorted(values_of(hints[0]) | values_of(hints[1]), key=repr):
        accepted = []
        try:
            given = {"max_tokens": 2**31 - 1} if field == "min_tokens" else {}
            check_sampling(SamplingParams(**given | {field: value}), llm.info.vocab_size)
            accepted.append("LLM")
        except FdError:
            pass
        try:
            request = msgspec.convert({"prompt": "a", field: value}, CompletionRequest)
            sampling_params(request, llm.info, [16 if request.max_tokens is None else request.max_tokens], None)
            accepted.append("HTTP")
        except (FdError, msgspec.ValidationError):
            pass
        same = accepted in ([], ["LLM", "HTTP"])
        assert same is ((field, value) not in DIFFERENT), f"{field}={value} is accepted by {accepted}"


@pytest.mark.parametrize("chat", [LLM.chat, AsyncLLM.chat])
def test_chat_takes_every_argument_of_templates(chat: Any) -> None:
    rendered = {*inspect.signature(ChatTemplate.render).parameters} - {"self", "image_text"}
    taken = {NAMES.get(name, name) for name in inspect.signature(chat).parameters}
    assert rendered <= taken
    assert {*NAMES, "add_generation_prompt", "continue_final_message"} <= {*ChatRequest.__struct_fields__}


def test_chat_continues_the_last_message(llm: LLM) -> None:
    turns = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two"}]
    prompts: list[str] = []
    generate = llm.generate
    try:
        llm.generate = lambda texts, *_: prompts.extend(llm.tokenizer.decode(each.ids) for each in texts)  # type: ignore[method-assign,assignment]
        llm.chat(turns)
        llm.chat(turns, add_generation_prompt=False)
        llm.chat(turns, continue_final_message=True)
    finally:
        llm.generate = generate  # type: ignore[method-assign]
    begun, plain, continued = prompts
    assert continued.endswith("one, two")
    assert plain.startswith(continued)
    assert begun.startswith(plain)
    assert len(begun) > len(plain) > len(continued)
    with pytest.raises(FdError, match="continue_final_message and add_generation_prompt exclude each other"):
        llm.chat(turns, add_generation_prompt=True, continue_final_message=True)


def test_stop_may_be_none_and_only_texts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    assert llm.generate([[1, 2]], params, stop=None)[0].text == llm.generate([[1, 2]], params)[0].text
    for wrong in (5, [5], b"x"):
        with pytest.raises(FdError, match="stop: expected a text or a list of texts"):
            llm.generate([[1, 2]], params, stop=wrong)  # type: ignore[arg-type]


def test_min_tokens_that_the_context_cannot_hold_are_rejected(llm: LLM) -> None:
    with pytest.raises(FdError, match="min_tokens=62 exceeds the 61 tokens that may be generated"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=100, min_tokens=62))
    [found] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(found.token_ids) == 61
    assert found.finish_reason == "length"
