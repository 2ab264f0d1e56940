from __future__ import annotations

import time
import tracemalloc
from datetime import datetime
from typing import Any

import pytest

from fd_core.errors import BadRequest, ModelError
from fd_core.text.chat_template import ChatTemplate, flatten_messages
from fd_core.text.template_budget import MAX_CHARS

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[Any] = HELLO, **kwargs: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **kwargs)


def test_conversation_is_rendered() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    assert render(CHATML, messages) == turns + "<|im_start|>assistant\n"
    assert render(CHATML, messages, add_generation_prompt=False) == turns


def test_features_that_templates_expect() -> None:
    source = (
        "{{ bos_token }}{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
        "{% if thinking %}{% break %}{% endif %}{% endfor %}{{ tools | tojson }}{{ eos_token }}"
        "{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n ~ '!' }}"
        "{% generation %}g{% endgeneration %}{{ [1, 2] | join(', ') }}{{ 'a b'.split()[-1] | upper }}"
        "{{ 'x' * 3 }}{{ messages | map(attribute='role') | list | length }}{{ 7 % 4 }}"
    )
    tools = [{"type": "function", "function": {"name": "größe"}}]
    assert render(source, HELLO * 2, tools=tools, template_kwargs={"thinking": True}) == (
        '<s>1/2False[{"type": "function", "function": {"name": "größe"}}]</s>2!g1, 2Bxxx23'
    )


@pytest.mark.parametrize("content", ["Well, ", "Well,\n", "", "hello"])
def test_last_message_may_be_continued(content: str) -> None:
    turns = [*HELLO, {"role": "assistant", "content": content}]
    prompt = render(CHATML, turns, add_generation_prompt=False, continue_final_message=True)
    assert prompt == f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n{content}"


def test_message_with_calls_cannot_be_continued() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [*HELLO, {"role": "assistant", "content": "Well, ", "tool_calls": [call]}]
    with pytest.raises(BadRequest, match="append the results") as caught:
        render(CHATML, turns, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("source", ["nothing", "{{ messages[-1].content }}{{ messages[-1].content }}"])
def test_continuing_a_message_rendered_not_once_is_rejected(source: str) -> None:
    with pytest.raises(BadRequest, match="cannot be continued") as caught:
        render(source, continue_final_message=True)
    assert caught.value.field == "continue_final_message"


def test_documents_are_passed_to_templates_that_use_them() -> None:
    source = "{% if documents is defined %}{% for d in documents %}[{{ d.text }}]{% endfor %}{% endif %}"
    assert render(source, documents=[{"text": "a"}, {"text": "b"}]) == "[a][b]"
    assert render(source) == render(source, documents=[]) == ""
    with pytest.raises(BadRequest, match="does not support documents"):
        render(CHATML, documents=[{"text": "a"}])


def test_clock_is_an_argument() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render(HELLO) == "26 Jul 2024"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    assert render("{{ messages[0].content }}|", [{"role": "assistant", "content": None}]) == "|"


def test_arguments_of_tool_calls_become_objects() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "tool_calls": [call]}
    assert render("{{ messages[0].tool_calls[0].function.arguments.x }}", [message]) == "1"
    assert call["function"]["arguments"] == '{"x": 1}', "the caller's message is not changed"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": 3, "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "tool_calls": 3}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [3]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_malformed_message_is_named_by_its_field(messages: Any, field: str) -> None:
    with pytest.raises(BadRequest) as raised:
        flatten_messages(messages)
    assert raised.value.field == field


def test_template_exception_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="rejected the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequest, match="cannot render"):
        render("{{ messages[0]['content'] + 3 }}")
    with pytest.raises(BadRequest, match="cannot render"):
        render("{{ messages[9].content.x }}")


def test_template_kwargs_cannot_override_reserved_names() -> None:
    with pytest.raises(BadRequest, match="bos_token"):
        render(CHATML, template_kwargs={"bos_token": "x"})
    with pytest.raises(BadRequest, match="strftime_now"):
        render(CHATML, template_kwargs={"strftime_now": None})


def test_invalid_template_names_the_line() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("\n{% for %}").render(HELLO)
    with pytest.raises(ModelError):
        ChatTemplate("{{ 1 | center }}").render(HELLO)
    with pytest.raises(ModelError):
        ChatTemplate("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}").render(HELLO)
    with pytest.raises(ModelError, match="allowed"):
        ChatTemplate("x" * (2 << 20)).render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__self__ }}",
        "{{ strftime_now.__func__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ ('a' | attr('__class__')) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum() }}",
    ],
)
def test_sandbox_cannot_be_escaped(source: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    try:
        rendered = render(source, messages)
    except (BadRequest, ModelError):
        rendered = ""
    assert rendered == ""
    assert messages == HELLO


ENDLESS = [
    "{% for i in range(1000000000) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in [[[[]]]] recursive %}{{ loop(a) }}{{ loop([a]) }}{% endfor %}",
]
GROWING = [
    "{{ 'x' * 1000000000 }}",
    "{{ 1000000000 * 'x' }}",
    "{{ [0] * 1000000000 }}",
    "{{ (9 ** 9 ** 9) | length }}",
    "{{ 10 ** 1000000 }}",
    "{% set ns = namespace(s='xxxxxxxxxx') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxxxx') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=3) %}{% for i in range(99) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
    "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}",
    "{% set s = 'a' * 1000000 %}{{ s | replace('a', s) }}",
    "{% set s = 'a' * 1000000 %}{{ s.join([s] * 1000) }}",
    "{% set s = 'a' * 1000000 %}{{ ([s] * 1000) | join(s) }}",
    "{% set s = 'a' * 1000000 %}{{ ([s] * 1000) | tojson }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ 'x'.center(999999999) }}",
    "{{ 'x'.rjust(width=999999999) }}",
    "{{ 'x'.zfill(999999999) }}",
    "{{ '\t'.expandtabs(999999999) }}",
    "{{ 'x' | indent(999999999, first=true) }}",
    "{{ {'a': 1} | tojson(indent=999999999) }}",
]


@pytest.mark.parametrize("source", ENDLESS)
@pytest.mark.timing
def test_endless_template_is_stopped(source: str) -> None:
    began = time.perf_counter()
    with pytest.raises((ModelError, BadRequest)):
        render(source)
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize("source", GROWING)
def test_template_with_too_much_output_is_stopped_early(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((ModelError, BadRequest)):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_CHARS
    finally:
        tracemalloc.stop()


def test_long_conversation_is_within_the_limits() -> None:
    rendered = render(CHATML, [{"role": "user", "content": "word " * 200}] * 3000)
    assert len(rendered) > 3_000_000
