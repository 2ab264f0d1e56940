"""The parser of a format reads everything its call grammar allows as calls with valid arguments."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from fd_core.errors import BadRequest, ModelError
from fd_core.models.catalog import resolve_model
from fd_core.models.opening import open_checkpoint
from fd_core.structured.compiler import GrammarCompiler, grammar_vocabulary
from fd_core.structured.grammar import CallsConstraint, RequestedCall
from fd_core.text.parsing.contract import ToolParser
from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Content, ReasoningDelta, joined
from fd_core.text.parsing.formats.harmony import HarmonyTools
from fd_core.text.parsing.formats.json_calls import (
    DeepSeekTools,
    DeepSeekV31Tools,
    ErnieTools,
    HermesTools,
    LlamaJsonTools,
    MistralTools,
)
from fd_core.text.parsing.formats.pythonic import PythonicTools
from fd_core.text.parsing.formats.tagged import GlmTools, MiniMaxTools, QwenCoderTools
from fd_core.text.tokenizer import Decoding, Tokenizer, byte_level, load_tokenizer

JSON_FORMATS = [HermesTools, ErnieTools, LlamaJsonTools, MistralTools, DeepSeekTools, DeepSeekV31Tools, HarmonyTools]
TAGGED_FORMATS = [GlmTools, QwenCoderTools, MiniMaxTools]
OTHER_FORMATS = [PythonicTools, *TAGGED_FORMATS]
EACH = pytest.mark.parametrize("parser", JSON_FORMATS + OTHER_FORMATS, ids=lambda each: each.__name__)
EACH_OTHER = pytest.mark.parametrize("parser", OTHER_FORMATS, ids=lambda each: each.__name__)
CONTROL = pytest.mark.parametrize("control", [False, True], ids=["markers as text", "control tokens"])

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["C", "F", None, 7, True]},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}},
    "book": {
        "type": "object",
        "properties": {
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "seat": {"type": ["integer", "string"]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}\\d$"},
            "word": {"type": "string", "minLength": 2, "maxLength": 4},
            "when": {"type": "string", "format": "date"},
            "who": {"$ref": "#/$defs/person"},
            "tags": {"type": "array", "items": {"type": ["string", "boolean"]}},
            "any": {},
            "size": {"type": ["string", "object"]},
            "map": {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "boolean"}},
        },
        "required": ["who", "when"],
        "additionalProperties": False,
        "$defs": {
            "person": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "old": {"type": "boolean"},
                    "friends": {"type": "array", "items": {"$ref": "#/$defs/person"}},
                },
                "required": ["name"],
                "additionalProperties": False,
            }
        },
    },
    "store": {"type": "object", "additionalProperties": {"type": "integer"}},
    "log": {"type": "object"},
}
PHRASES = [
    *"\"'<>[]{},:=() \n\\",
    *"aé7",
    '": ',
    "true",
    "null",
    "None",
    "42",
    '"}',
    "\n</parameter>\n",
    "</parameter>",
]
PHRASES += [
    "</arg_value>",
    "</tool_call>",
    "<|end|>",
    "<|start|>",
    "<|call|>",
    "analysis",
    "```",
    "<tool_call>",
    "[now(",
]


@cache
def tokenizer(markers: tuple[str, ...]) -> Tokenizer:
    """A tokenizer of bytes, with `markers` as control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in ("<|eos|>", *markers)])
    return Tokenizer(backend=backend, decoding=Decoding(byte_level), eos_id=256)


@cache
def compiler(markers: tuple[str, ...]) -> GrammarCompiler:
    return GrammarCompiler(lambda: grammar_vocabulary(tokenizer(markers), 257 + len(markers), (256,)))


def special(parser: type[ToolParser], control: bool) -> tuple[str, ...]:
    return parser.markers if control else ()


def requested(parser: type[ToolParser], schemas: dict[str, Any]) -> list[RequestedCall]:
    return [RequestedCall(parser.form(name), schema, name) for name, schema in schemas.items()]  # type: ignore[arg-type]


def grammar(parser: type[ToolParser], control: bool, schemas: dict[str, Any], chosen: bool = False) -> str:
    known = {each: tokenizer(special(parser, control)).control_tokens[each] for each in special(parser, control)}
    form = CallsConstraint(
        calls=requested(parser, schemas),
        control_tokens=known,
        is_demanded=not chosen,
        before=parser.before_calls,
        markers=parser.markers,
        answer_begin=parser.answer_begin,
        several=True,
    )
    return form.grammar("tools")


def walk(made: str, markers: tuple[str, ...], dice: random.Random, *begins: str, limit: int = 600) -> tuple[str, bool]:
    """Return a random text that a grammar allows, and whether it is complete."""
    words = tokenizer(markers)
    phrases = [words.encode(each, add_special=False) for each in [*PHRASES, *begins, *begins, *begins, *markers]]
    matcher: LLMatcher = compiler(markers).matcher(made)
    tokens: list[int] = []
    while len(tokens) < limit:
        if matcher.is_accepting() and (matcher.is_stopped() or dice.random() < 0.3):
            return words.decode(tokens, skip_special=False), True
        step = matcher.compute_ff_tokens()
        if not step and dice.random() < 0.7:
            fitting = [each for each in phrases if matcher.validate_tokens(each) == len(each)]
            step = dice.choice(fitting) if fitting else []
        if not step:
            mask = matcher.compute_logit_bias()
            allowed = [each for each, bias in enumerate(mask) if bias and each != 256]
            plain = [each for each in allowed if bytes(words.byte_table[each]).isalnum()]
            step = [dice.choice(plain if plain and dice.random() < 0.7 else allowed)]
        matcher.consume_tokens(step)
        assert not matcher.is_error(), matcher.get_error()
        tokens += step
    return words.decode(tokens, skip_special=False), False


def read(parser: type[ToolParser], text: str, cut: int | None = None) -> list[Any]:
    reading = parser(SCHEMAS)
    pieces = [text] if cut is None else [text[:cut], text[cut:]]
    return joined([*(event for piece in pieces for event in reading.push(piece)), *reading.flush()])


def calls_of(events: list[Any]) -> list[tuple[str, str]]:
    names = {event.index: event.name for event in events if isinstance(event, CallBegun)}
    ended = [event.index for event in events if isinstance(event, CallEnded)]
    assert ended == sorted(names), "every call is complete"
    return [
        (names[index], "".join(e.text for e in events if isinstance(e, ArgumentsDelta) and e.index == index))
        for index in ended
    ]


def check(parser: type[ToolParser], text: str, dice: random.Random) -> int:
    """Validate the generated calls against their schemas; return the number of calls."""
    events = read(parser, text)
    assert read(parser, text, dice.randint(0, len(text))) == events
    calls = calls_of(events)
    for name, arguments in calls:
        value = json.loads(arguments)
        jsonschema.validate(value, SCHEMAS[name])
        for key, each in value.items() if parser in TAGGED_FORMATS else ():
            written = each if isinstance(each, str) else None
            assert written is None or f">\n{written}\n</" in text or f">{written}</" in text, key
            assert key in text
    return len(calls)


@EACH
@CONTROL
def test_required_calls_match_their_schemas(parser: type[ToolParser], control: bool) -> None:
    dice = random.Random(parser.__name__)
    made = grammar(parser, control, SCHEMAS)
    whole = 0
    for _ in range(50):
        text, complete = walk(made, special(parser, control), dice)
        if complete:
            whole += 1
            events = read(parser, text)
            assert check(parser, text, dice) >= 1, text
            assert parser.before_calls or not any(isinstance(event, Content | ReasoningDelta) for event in events), text
    assert whole > 3


@EACH
@CONTROL
def test_optional_calls_match_their_schemas(parser: type[ToolParser], control: bool) -> None:
    dice = random.Random(parser.__name__)
    made = grammar(parser, control, SCHEMAS, chosen=True)
    form = parser.form("now")
    assert form is not None
    calls = 0
    for _ in range(80):
        text, complete = walk(made, special(parser, control), dice, form.opening + form.begin, form.trigger)
        if complete:
            calls += check(parser, text, dice)
    assert calls > 3


@EACH
@CONTROL
def test_truncated_output_of_a_grammar_can_be_parsed(parser: type[ToolParser], control: bool) -> None:
    dice = random.Random(parser.__name__)
    made = grammar(parser, control, SCHEMAS)
    text = max((walk(made, special(parser, control), dice, limit=300)[0] for _ in range(5)), key=len)
    for end in range(len(text)):
        for event in read(parser, text[:end]):
            assert not isinstance(event, CallBegun) or event.name in SCHEMAS


VALUES = {
    "city": "Zürich (\"x\" 'y')\n[z] <b> 🙂\\",
    "unit": None,
    "days": 3,
    "exact": True,
}
BOOK = {
    "note": "null and void",
    "seat": 12,
    "code": "AB1",
    "word": "Zoë",
    "when": "2024-01-31",
    "who": {"name": "a", "old": False, "friends": [{"name": "b"}]},
    "tags": ["x", True],
    "any": {"a": [1.5, None]},
    "size": '[1" or more',
    "map": {"a": 1, "b": True},
}


def in_order(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: arguments[key] for key in SCHEMAS[name].get("properties", arguments) if key in arguments}


def templated(parser: type[ToolParser], name: str, arguments: dict[str, Any]) -> str:
    """Return a call as the model's template writes it."""
    form = parser.form(name)
    assert form is not None
    arguments = in_order(name, arguments)
    if form.arguments == "python":
        inner = ", ".join(f"{key}={quoted(value)}" for key, value in arguments.items())
    elif form.arguments == "json":
        inner = json.dumps(arguments, ensure_ascii=False)
    else:
        inner = "".join(
            form.arguments.before_key
            + key
            + form.arguments.before_value
            + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            + form.arguments.after_value
            for key, value in arguments.items()
        )
    return form.opening + form.begin + inner + form.end + form.closing


def quoted(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {quoted(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(quoted, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


@EACH
@CONTROL
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("weather", VALUES), ("book", BOOK), ("now", {}), ("store", {"a": 1, "b-c": 2}), ("log", {"x": "a b", "y": [1]})],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_call_in_template_format_is_allowed_and_parsed(
    parser: type[ToolParser], control: bool, name: str, arguments: dict[str, Any]
) -> None:
    if parser is PythonicTools:
        arguments = {key.replace("-", "_"): value for key, value in arguments.items()}
    text = templated(parser, name, arguments)
    for chosen in (False, True):
        assert complete(parser, control, text, chosen)
    [(called, raw)] = calls_of(read(parser, text))
    assert (called, json.loads(raw)) == (name, arguments)


def complete(parser: type[ToolParser], control: bool, text: str, chosen: bool = False) -> bool:
    markers = special(parser, control)
    matcher = compiler(markers).matcher(grammar(parser, control, SCHEMAS, chosen))
    tokens = [*tokenizer(markers).encode(text, add_special=False), 256]
    return bool(matcher.validate_tokens(tokens) == len(tokens))


@EACH
@CONTROL
def test_invalid_arguments_are_not_allowed(parser: type[ToolParser], control: bool) -> None:
    for name, wrong in (
        ("weather", VALUES | {"days": 15}),
        ("weather", VALUES | {"unit": "K"}),
        ("weather", {"unit": "C"}),
        ("book", BOOK | {"code": "ab1"}),
        ("book", BOOK | {"code": "AB\N{ARABIC-INDIC DIGIT THREE}"}),
        ("book", BOOK | {"when": "2023-02-29"}),
        ("book", BOOK | {"word": "toolong"}),
        ("book", BOOK | {"who": {"old": True}}),
        ("now", {"x": 1}),
    ):
        form = parser.form(name)
        assert form is not None
        text = templated(parser, name, wrong)
        if name == "now":
            text = templated(parser, "log", wrong).replace("log", "now")
        if (parser, name) in ((m, "now") for m in JSON_FORMATS):
            continue  # a JSON object may have other properties
        assert not complete(parser, control, text), (name, wrong)
        assert not complete(parser, control, text, chosen=True), (name, wrong)


@EACH
@CONTROL
def test_text_without_calls_is_allowed_only_if_calls_are_optional(parser: type[ToolParser], control: bool) -> None:
    text = parser.answer_begin + "Just a text, [x] <b> 3 < 4."
    assert complete(parser, control, text, chosen=True)
    assert not complete(parser, control, text)


@CONTROL
def test_reasoning_message_before_a_call_is_unconstrained(control: bool) -> None:
    call = templated(HarmonyTools, "now", {})
    text = f'<|channel|>analysis<|message|>Hm {{"a"}}, <b>.<|end|><|start|>assistant{call}'
    for chosen in (False, True):
        assert complete(HarmonyTools, control, text, chosen)
    assert [event for event in read(HarmonyTools, text) if isinstance(event, ReasoningDelta)] == [
        ReasoningDelta('Hm {"a"}, <b>.')
    ]


@EACH_OTHER
@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"anyOf": [{"type": "object"}]}, "f.anyOf"),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "f.properties.a.pattern"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "f.properties.a"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}}, "f.properties.a"),
        ({"properties": {"a": {"allOf": [{"type": "string"}, {"minLength": 1}]}}}, "f.properties.a"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"maxLength": 1}]}}}, "f.properties.a"),
        ({"properties": {"a": {"enum": ["b", "c"], "anyOf": [{"const": "b"}]}}}, "f.properties.a"),
        ({"properties": {"a": False}}, "f.properties.a"),
        ({"properties": {"a": 3}}, "f.properties.a"),
        ({"properties": {'a>b "</arg_key>': {}}}, 'f.properties.a>b "</arg_key>'),
        ({"minProperties": 1}, "f.minProperties"),
    ],
)
def test_unsupported_schema_is_rejected_by_its_path(parser: type[ToolParser], schema: Any, field: str) -> None:
    if parser is PythonicTools and "pattern" in field:
        return  # its strings are JSON, and the compiler of JSON schemas decides
    with pytest.raises(BadRequest) as caught:
        grammar(parser, False, {"f": {"type": "object", **schema}})
    assert caught.value.field == field


@EACH_OTHER
def test_exponential_or_endless_schema_is_rejected(parser: type[ToolParser]) -> None:
    doubled = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)}
    endless = {"d0": {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}]}}
    for definitions in (doubled | {"d40": {"type": "string"}}, endless):
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}
        with pytest.raises(BadRequest):
            grammar(parser, False, {"f": schema})


@pytest.mark.parametrize("parser", TAGGED_FORMATS)
def test_bounded_string_does_not_exhaust_the_lexer(parser: type[ToolParser], smollm2: Tokenizer) -> None:
    """Excluding a whole marker next to a bound exceeds the lexer's limit for multi-character tokens."""
    form = parser.form("f")
    assert form is not None and not isinstance(form.arguments, str)
    value = {"type": ["string", "integer", "null"], "maxLength": 200}
    schema = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    words = GrammarCompiler(lambda: grammar_vocabulary(smollm2, 49_152, (2,)))
    matcher = words.matcher(grammar(parser, False, {"f": schema}))
    begin = form.begin + form.arguments.before_key + "a" + form.arguments.before_value
    text = "\n\n3\n and many words: 3 (of 4) /param and\n\nlines. " * 4
    end = form.arguments.after_value + form.end
    for token in smollm2.encode(form.opening + begin + text + end, add_special=False):
        assert matcher.try_consume_tokens([token]) == 1, smollm2.decode([token])
        matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    try:
        return load_tokenizer(open_checkpoint(resolve_model("smollm2").path))
    except ModelError as error:
        pytest.skip(f"SmolLM2 is not available: {error}")
