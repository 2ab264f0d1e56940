"""Output constraints over HTTP: every way to request one, and clear errors for invalid ones."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from fd_core.errors import BadRequest
from fd_core.server.preprocess.structured_fields import StructuredFields
from fd_core.structured.grammar import json_schema
from fd_core.structured.schemas import compilable
from fd_core.text.tokenizer import byte_tokenizer
from tests.engine.structured import SCHEMA
from tests.server.fakes import FakeClient, LiveServer, live, samples
from tests.server.stream.test_disconnect import eventually
from tests.server.test_null_engine import null_client, wait_until_idle

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
PATTERN = "[a-c]{2,4}!"
CHOICES = ["yes", "no", "perhaps"]
LARK = 'start: "<" "a"~1..3 ">"'
GBNF = 'root ::= "<" "a" ("a" | "b")? ">"'
TAG = {"structures": [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}], "triggers": ["<f>"]}
NEWER = {"tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"const": 1}}, "end": "</f>"}]}
NEWER |= {"type": "triggered_tags", "triggers": ["<f>"]}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def null() -> Iterator[LiveServer]:
    with live(null_client, tokenizer=byte_tokenizer()) as server:
        yield server


def is_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def is_pattern(text: str) -> bool:
    return re.fullmatch(PATTERN, text) is not None


def is_choice(text: str) -> bool:
    return text in CHOICES


def is_tag(text: str) -> bool:
    return re.fullmatch("<a[ab]{0,2}>", text) is not None


def is_mixed(text: str) -> bool:
    return text.count("<f>") == text.count("<f>1</f>")


NAMED = {"name": "x", "strict": True, "schema": SCHEMA}
FORMS: list[tuple[dict[str, Any], Any]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        is_schema,
    ),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_schema),
    ({"structured_outputs": {"json": SCHEMA}}, is_schema),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "whitespace_pattern": " ?"}}, is_schema),
    ({"structured_outputs": {"regex": PATTERN}}, is_pattern),
    ({"structured_outputs": {"choice": CHOICES}}, is_choice),
    ({"structured_outputs": {"grammar": LARK}}, is_tag),
    ({"structured_outputs": {"structural_tag": TAG}}, is_mixed),
    ({"structured_outputs": {"structural_tag": json.dumps({"format": NEWER})}}, is_mixed),
    ({"guided_json": SCHEMA}, is_schema),
    ({"guided_regex": PATTERN}, is_pattern),
    ({"guided_choice": CHOICES}, is_choice),
    ({"guided_grammar": GBNF}, is_tag),
    ({"structural_tag": TAG}, is_mixed),
    ({"response_format": {"type": "structural_tag", **TAG}}, is_mixed),
    ({"regex": PATTERN}, is_pattern),
    ({"ebnf": GBNF}, is_tag),
    ({"json_schema": json.dumps(SCHEMA)}, is_schema),
]


def text_of(answer: Any) -> tuple[str, str]:
    (choice,) = answer.json["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"]


@pytest.mark.parametrize(
    ("fields", "holds"), FORMS, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_every_constraint_field(null: LiveServer, path: str, fields: dict[str, Any], holds: Any) -> None:
    prompt = {"prompt": "a"} if path == TEXT else {"messages": HI}
    answer = null.post(path, {**prompt, **fields, "max_tokens": 120, "temperature": 0.9, "seed": 4})
    assert answer.status == 200, answer.body
    assert "x-ignored-fields" not in answer.headers
    text, reason = text_of(answer)
    assert reason == ("length" if holds is is_mixed and len(text) > 30 else "stop"), text
    assert holds(text), text


def test_any_json_object(null: LiveServer) -> None:
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json_object": True},
    ):
        for seed in range(20):
            answer = null.post(TEXT, {"prompt": "a", **fields, "max_tokens": 100, "temperature": 1.0, "seed": seed})
            text, reason = text_of(answer)
            assert text.startswith("{")
            if reason == "stop":
                assert is_object(text)
                break
        else:
            pytest.fail("no answer was complete")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {"properties": {"a": {"items": {"type": "strng"}}}}}, ".properties.a.items", "Invalid type"),
        ({"guided_json": {"$defs": {"d": {"not": {}}}, "anyOf": [{"$ref": "#/$defs/d"}]}}, ".$defs.d", "not"),
        ({"guided_json": {"type": "object", "required": ["a"], "properties": {"a": False}}}, "", "property 'a'"),
        ({"guided_json": {"items": {"multipleOf": 10**9 + 7}}}, ".items.multipleOf", "too many states"),
        ({"guided_json": {"$ref": "https://example.org/x"}}, "", "not fetch"),
        ({"guided_json": {"type": "string", "pattern": "(a"}}, "", "unclosed group"),
        ({"guided_json": {"const": "x" * 2**20}}, "", "at most 131,072"),
        ({"guided_json": [1]}, "", "expected"),
        ({"guided_json": "[1]"}, "", "JSON schema as an object"),
        ({"guided_regex": "(a"}, "", "unclosed group"),
        ({"guided_choice": ["a"] * 5000}, "", "4096"),
        ({"guided_grammar": "start: foo"}, "", 'unknown name: "foo"'),
        ({"guided_grammar": "root ::= foo"}, "", "foo"),
        ({"guided_grammar": "root ::= " + "(" * 9000}, "", "nested"),
        ({"structural_tag": {"structures": [{}], "triggers": ["<"]}}, ".structures[0].begin", "non-empty"),
        ({"response_format": {"type": "json_schema"}}, ".json_schema", "required"),
        ({"response_format": {"type": "yaml"}}, ".type", "json_object"),
        ({"response_format": "json"}, "", "object"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "only one"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "cannot be combined"),
        ({"guided_regex": "a", "min_tokens": 1, "max_tokens": 4}, "min_tokens", "cannot be combined"),
        ({"structured_outputs": {"json": {"anyOf": [{}, {"type": "strng"}]}}}, ".json.anyOf[1]", "Invalid type"),
    ],
)
@pytest.mark.timing
def test_invalid_constraint_is_a_400_naming_the_path(
    null: LiveServer, fields: dict[str, Any], param: str, words: str
) -> None:
    began = time.monotonic()
    answer = null.post(TEXT, {"prompt": "a", **fields})
    assert answer.status == 400, answer.body
    field = next(iter(fields))
    assert answer.error["param"] == (param if param.isidentifier() else field + param)
    assert words in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"
    assert time.monotonic() - began < 8
    assert null.post(TEXT, {"prompt": "a", "max_tokens": 2}).status == 200


HOSTILE: list[dict[str, Any]] = [
    {"guided_regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"},
    {"guided_regex": "(.*a){400}"},
    {"guided_regex": "(a|b)*a(a|b){200}"},
    {"guided_grammar": 'start: start start | "a" | ""'},
    {"guided_grammar": 'start: x{1000}\nx: y{1000}\ny: "a"'},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"allOf": [{"$ref": "#"}]}},
    {"guided_json": {"$defs": {"n": {"properties": {"l": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}},
    {"guided_json": {"properties": {f"p{i}": {"pattern": f"^[a-z]{{{i},90}}$"} for i in range(300)}}},
    {"guided_json": {"type": "array", "minItems": 10**9}},
    {"guided_json": {"type": "string", "minLength": 10**9}},
    {"guided_json": {"type": "integer", "minimum": -(10**300), "maximum": 10**300}},
    {"guided_json": {"enum": ["x" * 25 + str(i) for i in range(3000)]}},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=lambda fields: str(fields)[:60])
@pytest.mark.timing
def test_hostile_constraints_end_cleanly_and_leave_nothing(null: LiveServer, fields: dict[str, Any]) -> None:
    began = time.monotonic()
    answer = null.post(TEXT, {"prompt": "a", **fields, "max_tokens": 30, "temperature": 1.0, "seed": 1})
    assert time.monotonic() - began < 15
    if answer.status == 200:
        assert text_of(answer)[1] in ("stop", "length")
    else:
        assert answer.status == 400, answer.body
        assert answer.error["message"]
    wait_until_idle(null)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_model_without_grammars_rejects_every_constraint(path: str) -> None:
    prompt = {"prompt": "a"} if path == TEXT else {"messages": HI}
    with live(lambda: FakeClient(vocab_size=2**31)) as server:
        for fields, _ in FORMS:
            answer = server.post(path, {**prompt, **fields})
            assert (answer.status, answer.error["code"]) == (400, "invalid_grammar"), fields
            assert "2,147,483,648 token ids" in answer.error["message"]


def test_constrained_text_is_equal_as_stream_and_in_a_batch(null: LiveServer) -> None:
    body = {"prompt": "a", "guided_json": SCHEMA, "max_tokens": 120, "temperature": 1.0, "seed": 9}
    alone = text_of(null.post(TEXT, body))
    with ThreadPoolExecutor(8) as pool:
        others = list(pool.map(lambda n: text_of(null.post(TEXT, {**body, "user": str(n)})), range(8)))
    assert set(others) == {alone}
    client = openai.OpenAI(base_url=f"{null.url}/v1", api_key="none", max_retries=0)
    with client.completions.create(
        model="null",
        prompt="a",
        max_tokens=120,
        temperature=1.0,
        seed=9,
        stream=True,
        extra_body={"guided_json": SCHEMA},
    ) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == alone[0]


def test_answer_truncated_by_max_tokens_reports_length(null: LiveServer) -> None:
    answer = null.post(CHAT, {"messages": HI, "guided_json": SCHEMA, "max_tokens": 5})
    assert text_of(answer) == ('{"nam', "length")


def test_metrics_count_grammars(null: LiveServer) -> None:
    null.post(TEXT, {"prompt": "a", "guided_choice": ["something new", "something old"]})
    counted = ("fdcore_grammars_compiled_total", "fdcore_forced_accepted_tokens_total")
    eventually(lambda: all(samples(null).get(name, 0) > 0 for name in counted))
    found = samples(null)
    assert found["fdcore_grammar_compile_seconds_total"] > 0
    assert found["fdcore_grammar_mask_seconds_total"] > 0
    assert found["fdcore_forced_drafted_tokens_total"] >= found["fdcore_forced_accepted_tokens_total"] > 0


def test_every_field_is_covered() -> None:
    covered = {name for fields, _ in FORMS for name in fields} | {"guided_json_object", "grammar"}
    ours = set(StructuredFields.__struct_fields__) - {"prompt_logprobs"}
    assert covered | {"guided_whitespace_pattern"} == ours


def exponential(properties: int) -> dict[str, Any]:
    """Return two schemas that refer to each other in every property, and whose options must be distinguished."""
    names = [f"p{index}" for index in range(properties)]
    one, other = (
        {"type": "object", "required": names, "properties": {name: {"$ref": f"#/$defs/{target}"} for name in names}}
        for target in ("b", "a")
    )
    return {"$defs": {"a": one, "b": other}, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}


WEAPONS: list[dict[str, Any]] = [
    {"guided_json": exponential(10)},
    {
        "guided_grammar": "\n".join(
            ["start: r0", *(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(3000)), 'r3000: "z"']
        )
    },
    {"guided_json": {"patternProperties": {f"^a{i:04}.*b": {"type": "string"} for i in range(1500)}}},
]


@pytest.mark.parametrize("fields", WEAPONS, ids=["references", "depth", "patterns"])
def test_exponential_schema_is_a_400_and_delays_no_other(null: LiveServer, fields: dict[str, Any]) -> None:
    with ThreadPoolExecutor(2) as pool:
        pending = [pool.submit(null.post, TEXT, {"prompt": "a", **fields}) for _ in range(2)]
        served = 0
        while not all(each.done() for each in pending):
            schema = {"type": "object", "properties": {f"n{served}": {"const": 1}}, "required": [f"n{served}"]}
            assert null.post(TEXT, {"prompt": "a", "guided_json": schema, "max_tokens": 2}).status == 200
            served += 1
    for each in pending:
        answer = each.result()
        assert (answer.status, answer.error["code"]) == (400, "invalid_grammar"), answer.body
        assert answer.error["param"].startswith(next(iter(fields)))


def test_nested_options_are_distinguished_within_a_budget() -> None:
    assert json_schema({"$defs": exponential(3)["$defs"], "$ref": "#/$defs/a"})
    options = [{"enum": [*range(10 * index, 10 * index + 60_000)]} for index in range(2)]
    mixed = {"oneOf": [*options, {"type": "string"}]}
    with pytest.raises(BadRequest, match="options are disjoint") as error:
        compilable(mixed, "schema")
    assert error.value.field == "schema.oneOf"


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "types": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "lengths": {"type": "string", "minLength": 5, "maxLength": 2},
    "no value": {"enum": []},
    "no option": {"anyOf": []},
    "range": {"type": "integer", "minimum": 5, "maximum": 2},
    "pattern": {"type": "string", "pattern": "^abc$", "minLength": 5},
    "const": {"const": 1, "type": "string"},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_unsatisfiable_schema_names_its_path(null: LiveServer, name: str) -> None:
    inner = CONTRADICTIONS[name]
    within = {"type": "object", "required": ["a"], "properties": {"a": inner}}
    for schema, path in ((inner, ""), (within, ".properties.a")):
        answer = null.post(TEXT, {"prompt": "a", "guided_json": schema})
        assert (answer.status, answer.error["param"]) == (400, f"guided_json{path}")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_grammar": "start: /a/ nothing\nnothing: nothing"},
        {"guided_grammar": 'start: "x" T\nT: /a+/ & /b+/'},
        {"guided_regex": "abc", "allowed_token_ids": [1, 2]},
        {"guided_regex": "abc", "bad_words": ["b"]},
        {"allowed_token_ids": [5], "bad_words_token_ids": [[5, 5]]},
    ],
    ids=str,
)
def test_request_that_allows_no_token_is_a_400(null: LiveServer, fields: dict[str, Any]) -> None:
    answer = null.post(TEXT, {"prompt": "a", "max_tokens": 9, **fields})
    assert (answer.status, answer.error["code"]) == (400, "no_way_on"), answer.body
    assert null.post(TEXT, {"prompt": "a", "max_tokens": 2}).status == 200
