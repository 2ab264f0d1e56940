"""Prompts become token ids in the same way for every reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from fd_core.errors import BadRequest
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.prompt_reader import PromptReader, PromptText, split_prompts, template_kwargs
from fd_core.text.template_budget import BRIEF_STEPS
from fd_core.text.tokenizer import byte_tokenizer

BYTES = byte_tokenizer()
TEMPLATE = ChatTemplate.of(BYTES)
DATED = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def reader() -> Iterator[PromptReader]:
    reader = PromptReader(BYTES, TEMPLATE, vocab_size=300)
    yield reader
    reader.close()


def fingerprint(tokenizer: Any, template: ChatTemplate | None) -> str:
    return PromptReader(tokenizer, template).fingerprint


def test_completion_prompt_is_text_or_ids(reader: PromptReader) -> None:
    assert reader.completion("ab") == [PromptText((64, 65), "ab")]
    assert reader.completion(["a", "b"]) == [PromptText((64,), "a"), PromptText((65,), "b")]
    assert reader.completion([0, 299]) == [PromptText((0, 299), None)]
    assert reader.completion([[1, 2], [3]]) == [PromptText((1, 2), None), PromptText((3,), None)]


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt"),
        ([[]], "prompt"),
        (["a", ""], r"prompt\[1\]"),
        ([[1], []], r"prompt\[1\]"),
    ],
)
def test_empty_prompt_is_rejected(reader: PromptReader, prompt: object, name: str) -> None:
    with pytest.raises(BadRequest, match=f"^{name} is empty") as caught:
        reader.completion(prompt)
    assert caught.value.code == "empty_prompt"


@pytest.mark.parametrize("prompt", [None, 1.5, [1, "a"], [[1], "a"], ["a", [1]], [[1.0]], [True], [["a"]], {"a": 1}])
def test_mixed_prompts_are_rejected(prompt: object) -> None:
    with pytest.raises(BadRequest, match="mixes texts and ids"):
        split_prompts(prompt)


@pytest.mark.parametrize("wrong", [-1, 300, 2**40])
def test_ids_outside_the_vocabulary_are_named(reader: PromptReader, wrong: int) -> None:
    with pytest.raises(BadRequest, match=f"token id {wrong} is out of range; the vocabulary has 300"):
        reader.completion([[1], [5, wrong, 7]])


def test_developer_role_is_rendered_as_system(reader: PromptReader) -> None:
    turns = [{"role": "developer", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert BYTES.decode(reader.chat(turns).ids) == "system: be\nuser: hi\nassistant: "
    assert BYTES.decode(reader.chat(turns, add_generation_prompt=False).ids) == "system: be\nuser: hi\n"


def test_template_sees_only_the_known_message_fields() -> None:
    shown = PromptReader(BYTES, ChatTemplate("{% for m in messages %}{{ m | tojson }}{% endfor %}"))
    message = {"role": "user", "content": "x", "name": None, "refusal": "no", "tool_call_id": "t"}
    assert BYTES.decode(shown.chat([message]).ids) == '{"role": "user", "content": "x", "tool_call_id": "t"}'


def test_template_variables_are_taken_from_the_request(reader: PromptReader) -> None:
    own = PromptReader(BYTES, ChatTemplate("{{ thinking }}"))
    turns = [{"role": "user", "content": "x"}]
    assert BYTES.decode(own.chat(turns, template_kwargs={"thinking": 7}).ids) == "7"
    for name in ("messages", "tools", "add_generation_prompt", "self", "bos_token"):
        with pytest.raises(BadRequest, match=f"must not set {name}"):
            own.chat(turns, template_kwargs={name: 1})


def test_conversation_that_renders_to_nothing_is_rejected() -> None:
    with pytest.raises(BadRequest, match="messages is empty"):
        PromptReader(BYTES, ChatTemplate("")).chat([{"role": "user", "content": "x"}])
    with pytest.raises(BadRequest, match="no chat template"):
        PromptReader(BYTES, None).chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(("size", "elsewhere"), [(8192, False), (8193, True)])
def test_long_prompts_are_read_on_a_thread(reader: PromptReader, size: int, elsewhere: bool) -> None:
    thread = asyncio.run(reader.run(size, threading.current_thread))
    assert (thread is not threading.current_thread()) == elsewhere


def test_fingerprint_depends_on_output_alone() -> None:
    assert fingerprint(BYTES, TEMPLATE) == fingerprint(replace(BYTES, eos_id=None), TEMPLATE)
    assert len({fingerprint(BYTES, each) for each in (None, TEMPLATE, ChatTemplate("{{ 1 }}"))}) == 3


def test_date_in_the_template_does_not_change_the_fingerprint() -> None:
    first, second = (ChatTemplate(DATED, now=lambda day=day: datetime(2026, 1, day)) for day in (1, 2))
    assert fingerprint(BYTES, first) == fingerprint(BYTES, second)


def test_template_that_rejects_the_sample_has_a_fingerprint() -> None:
    assert fingerprint(BYTES, ChatTemplate("{{ raise_exception('no system') }}"))


def test_template_of_a_request_replaces_the_default(reader: PromptReader) -> None:
    turns = [{"role": "user", "content": "hi"}]
    for number in range(40):
        source = f"{number}: {{{{ messages[0].content }}}}"
        assert BYTES.decode(reader.chat(turns, template=source).ids) == f"{number}: hi"
    assert len(reader._given_templates) == 16
    with pytest.raises(BadRequest) as caught:
        reader.chat(turns, template="{% for %}")
    assert caught.value.field == "chat_template"


@pytest.mark.parametrize(
    ("kwargs", "thinking", "effort", "variables"),
    [
        (None, None, None, None),
        ({"a": 1}, None, None, {"a": 1}),
        (None, True, None, {"enable_thinking": True}),
        (None, None, "low", {"reasoning_effort": "low"}),
        (None, None, "none", {"reasoning_effort": "none", "enable_thinking": False}),
        (None, True, "none", {"reasoning_effort": "none", "enable_thinking": True}),
        ({"reasoning_effort": "high"}, None, "low", {"reasoning_effort": "high"}),
        (None, "yes", 3, None),
    ],
)
def test_reasoning_fields_become_template_variables(kwargs, thinking, effort, variables):
    assert template_kwargs(kwargs, thinking, effort) == variables


def _thread_of(reader: PromptReader, template: str, *, is_plain: bool) -> tuple[str, str]:
    """Return the rendered text and the name of the thread that rendered it last."""
    names = []

    def read() -> str:
        names.append(threading.current_thread().name)
        return ChatTemplate(template).render([{"role": "user", "content": "Hello"}])

    return asyncio.run(reader.render(5, read, is_plain=is_plain)), names[-1]


def test_short_plain_conversation_is_rendered_inline(reader: PromptReader) -> None:
    assert _thread_of(reader, "{{ messages[0].content }}", is_plain=True) == ("Hello", threading.current_thread().name)


def test_conversation_with_tools_is_rendered_on_a_thread(reader: PromptReader) -> None:
    assert _thread_of(reader, "{{ messages[0].content }}", is_plain=False) == ("Hello", "fdcore-text_0")


def test_template_with_many_steps_moves_to_the_thread(reader: PromptReader) -> None:
    many = f"{{% for i in range({2 * BRIEF_STEPS}) %}}{{% endfor %}}{{{{ messages[0].content }}}}"
    assert _thread_of(reader, many, is_plain=True) == ("Hello", "fdcore-text_0")


def test_rejected_conversation_is_rejected_on_the_thread(reader: PromptReader) -> None:
    with pytest.raises(BadRequest, match="no users"):
        _thread_of(reader, "{{ raise_exception('no users') }}", is_plain=True)
