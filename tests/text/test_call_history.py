"""Any arguments that a model wrote for a call are accepted in the history of a conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.errors import BadRequest
from fd_core.text.chat_template import ChatTemplate, flatten_messages

_EACH = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}<{{ c.function.name }}:"
_END = ">{% endfor %}{% endfor %}{{ tools }}"
TEMPLATES = {
    "json": "{{ c.function.arguments | tojson }}",
    "text or json": (
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}"
    ),
    "items": "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}",
    "method": "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
    "concatenation": "{{ 'with ' + c.function.arguments }}",
    "fromjson": "{% for k, v in (c.function.arguments | fromjson).items() %}{{ k }}={{ v }};{% endfor %}",
    "mapping or refused": "{% if c.function.arguments is not mapping %}{{ raise_exception('no object') }}{% endif %}",
}
SOURCES = {name: _EACH + part + _END for name, part in TEMPLATES.items()}
SOURCES["without tools"] = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ARGUMENTS = [
    '{"a": 1}',
    '{"a": tr',
    '{"a": "\\ud83d"}',
    '{"a": ' + "[" * 990 + "]" * 990 + "}",
    "[" * 100_000,
    '{"a": ' + "9" * 4000 + "}",
    '{"a": ' + "9" * 5000 + "}",
    *("", "  ", "null", "[1]", "3", '"text"', "NaN", "{}{}", None, [1], {"a": 1}, 7, True),
]


def history(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "user", "content": "and now?"},
    ]


@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda each: str(each)[:20])
def test_any_call_arguments_can_be_rendered(source: str, arguments: Any) -> None:
    text = ChatTemplate(source).render(history(arguments))
    assert "look" in text and "found" in text and "and now?" in text
    text.encode()


@given(text=st.text(alphabet='{}[]":,\\ud83dnul1ae .', max_size=30), source=st.sampled_from(list(SOURCES.values())))
def test_any_text_is_accepted_as_arguments(text: str, source: str) -> None:
    ChatTemplate(source).render(history(text)).encode()


def test_truncated_arguments_are_rendered_verbatim() -> None:
    text = ChatTemplate(SOURCES["text or json"]).render(history('{"city": "Par'))
    assert '<look:{"city": "Par>' in text
    assert 'arguments={"city": "Par;' in ChatTemplate(SOURCES["items"]).render(history('{"city": "Par'))


def test_templates_that_expect_text_get_text() -> None:
    text = ChatTemplate(SOURCES["concatenation"]).render(history('{"city":"Paris"}'))
    assert '<look:with {"city": "Paris"}>' in text


@pytest.mark.parametrize("calls", [[], None])
def test_empty_calls_are_omitted(calls: Any) -> None:
    [turn] = flatten_messages([{"role": "assistant", "content": "x", "tool_calls": calls}])
    assert "tool_calls" not in turn


def test_template_error_is_that_of_the_first_attempt() -> None:
    refusing = SOURCES["items"] + "{% if messages[0].role == 'user' %}{{ raise_exception('no user') }}{% endif %}"
    with pytest.raises(BadRequest, match="can only get item pairs"):
        ChatTemplate(refusing).render(history("[1]"))


def test_arguments_with_too_many_values_stay_text() -> None:
    arguments = json.dumps({"a": [[]] * 40_000})
    turns = flatten_messages(history(arguments))
    assert turns[1]["tool_calls"][0]["function"]["arguments"] == arguments


NONE = """{% for m in messages %}{% if m['content'] is none %}{% for c in m.tool_calls %}<{{ c.function.name }}:{{
c.function.arguments }}>{% endfor %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_calls_reach_templates_that_know_them_by_missing_content(content: dict[str, Any]) -> None:
    turns = history('{"city": "Paris"}')
    turns[1] = {"role": "assistant", "tool_calls": turns[1]["tool_calls"]} | content
    assert ChatTemplate(NONE).render(turns) == "[user]hello<look:{'city': 'Paris'}>[tool]found[user]and now?"
    assert ChatTemplate(NONE).render([{"role": "user", "content": None}]) == "[user]"


def short_ids(variable: str) -> str:
    refusal = f"{{% if {variable} | length != 9 %}}{{{{ raise_exception('ids have nine characters') }}}}{{% endif %}}"
    return f"{refusal}{{{{ {variable} }}}};"


SHORT_IDS = (
    "{% for m in messages %}{% for c in m.tool_calls %}" + short_ids("c.id") + "{% endfor %}{% if m.tool_call_id %}"
) + (short_ids("m.tool_call_id") + "{% endif %}{% endfor %}")


def test_ids_of_other_models_are_shortened_for_templates_that_need_it() -> None:
    first, second, end = ChatTemplate(SHORT_IDS).render(history("{}")).split(";")
    assert first == second and len(first) == 9 and first.isalnum() and not end
    assert ChatTemplate(SHORT_IDS.replace(" != 9", " == 0")).render(history("{}")) == "c1;c1;"
    kept = json.loads(json.dumps(history("{}")).replace("c1", "abcDEF123"))
    assert ChatTemplate(SHORT_IDS).render(kept) == "abcDEF123;abcDEF123;"
