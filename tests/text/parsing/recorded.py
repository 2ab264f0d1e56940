"""Texts as models write them, one or more for each format, and their meaning."""

from __future__ import annotations

from typing import Any, NamedTuple

from fd_core.text.parsing.answer import AnswerParser
from fd_core.text.parsing.contract import OutputParser
from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Content, Event, ReasoningDelta, joined
from fd_core.text.parsing.formats.harmony import HarmonyReasoning, HarmonyTools
from fd_core.text.parsing.formats.json_calls import (
    DeepSeekTools,
    ErnieTools,
    HermesTools,
    KimiTools,
    LlamaJsonTools,
    MistralTools,
    NemotronTools,
)
from fd_core.text.parsing.formats.pythonic import LfmTools, PythonicTools
from fd_core.text.parsing.formats.tagged import GlmTools, MiniMaxTools, QwenCoderTools
from fd_core.text.parsing.thinking import DeepSeekR1Reasoning, ErnieReasoning, MistralReasoning, QwenReasoning

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {}},
    },
    "now": {"type": "object", "properties": {}},
}
TOOL_PARSERS = {
    "hermes": HermesTools,
    "ernie45": ErnieTools,
    "llama3_json": LlamaJsonTools,
    "pythonic": PythonicTools,
    "mistral": MistralTools,
    "deepseek": DeepSeekTools,
    "glm45": GlmTools,
    "qwen3_coder": QwenCoderTools,
    "minimax_m2": MiniMaxTools,
    "kimi_k2": KimiTools,
    "lfm2": LfmTools,
    "nemotron": NemotronTools,
    "gpt_oss": HarmonyTools,
}
REASONING_PARSERS = {
    "qwen3": QwenReasoning,
    "deepseek_r1": DeepSeekR1Reasoning,
    "ernie45": ErnieReasoning,
    "mistral": MistralReasoning,
    "gpt_oss": HarmonyReasoning,
}


def parser(reasoning: str | None, tools: str | None, prompt: str = "") -> OutputParser:
    return AnswerParser(
        REASONING_PARSERS[reasoning](prompt) if reasoning else None, TOOL_PARSERS[tools](TOOLS) if tools else None
    )


def parsed(reading: OutputParser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in reading.push(piece)]
    return joined([*events, *reading.flush()])


class Answer(NamedTuple):
    """Content, reasoning and calls of an answer, joined over its events."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    """Name and arguments; those of a truncated call end with `…`."""


def answer_of(events: list[Event]) -> Answer:
    names = {event.index: event.name for event in events if isinstance(event, CallBegun)}
    ended = {event.index for event in events if isinstance(event, CallEnded)}
    texts = dict.fromkeys(names, "")
    for event in events:
        if isinstance(event, ArgumentsDelta):
            texts[event.index] += event.text
    return Answer(
        "".join(event.text for event in events if isinstance(event, Content)),
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        [(names[index], texts[index] + ("" if index in ended else "…")) for index in sorted(names)],
    )


class Recorded(NamedTuple):
    reasoning: str | None
    tools: str | None
    text: str
    means: Answer
    prompt: str = ""


ROME = '{"city": "Röm \\"}{\\u00e9", "days": [1, {"a": -2.5e3}], "where": {}}'
CALL = f'{{"name": "weather", "arguments": {ROME}}}'

LOOK = ("weather", ROME)
NOW = ("now", "{}")

RECORDED = {
    "plain": Recorded(None, "hermes", "Just a text, 3 < 4 <tool", Answer("Just a text, 3 < 4", "", [])),
    "hermes": Recorded(
        None,
        "hermes",
        f'Let me look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>\n',
        Answer("Let me look.", "", [LOOK, NOW]),
    ),
    "hermes, a list": Recorded(
        None,
        "hermes",
        f'<tool_call>[{CALL}, {{"name": "now", "arguments": {{}}}}]</tool_call>Done',
        Answer("Done", "", [LOOK, NOW]),
    ),
    "hermes, arguments first and as a string": Recorded(
        None,
        "hermes",
        '<tool_call>{"id": [1, "x"], "arguments": "{\\"city\\": \\"Rome\\"}", "name": "weather"}</tool_call>',
        Answer("", "", [("weather", '{"city": "Rome"}')]),
    ),
    "hermes, no call": Recorded(
        None,
        "hermes",
        "A <tool_call>not JSON</tool_call> or so",
        Answer("A not JSON or so", "", []),
    ),
    "hermes, a brace is missing": Recorded(
        None,
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"\n</tool_call>ok',
        Answer("ok", "", [("weather", '{"city": "Rome"\n')]),
    ),
    "hermes, cut": Recorded(
        None,
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Ro',
        Answer("", "", [("weather", '{"city": "Ro…')]),
    ),
    "hermes, cut in the name": Recorded(None, "hermes", 'Yes <tool_call>{"name": "wea', Answer("Yes", "", [])),
    "qwen3": Recorded(
        "qwen3",
        "hermes",
        f"<think>\nWhat is <b>?\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>",
        Answer("I look.", "What is <b>?", [LOOK]),
    ),
    "qwen3, begun by the prompt": Recorded(
        "qwen3",
        "hermes",
        "So\n\nit is\n</think>\n\nYes.\n",
        Answer("Yes.\n", "So\n\nit is", []),
        "assistant\n<think>\n",
    ),
    "qwen3, closed by the prompt": Recorded(
        "qwen3", None, " Yes.", Answer(" Yes.", "", []), "assistant\n<think>\n\n</think>\n\n"
    ),
    "qwen3, cut": Recorded("qwen3", None, "<think>\nHm </thin", Answer("", "Hm", [])),
    "deepseek_r1": Recorded("deepseek_r1", None, "Hm.\n</think>\n\nYes", Answer("Yes", "Hm.", [])),
    "mistral reasoning": Recorded("mistral", "mistral", "[THINK]Hm.[/THINK]Yes", Answer("Yes", "Hm.", [])),
    "ernie45": Recorded(
        "ernie45",
        "ernie45",
        f"Hm.\n</think>\n\n\n<response>\nI look.\n</response>\n\n<tool_call>\n{CALL}\n</tool_call>\n",
        Answer("I look.", "Hm.", [LOOK]),
    ),
    "ernie45 tools alone": Recorded(
        None,
        "ernie45",
        f"<response>\nYes\n</response>\n<tool_call>{CALL}</tool_call>",
        Answer("Yes", "", [LOOK]),
    ),
    "llama3_json": Recorded(
        None,
        "llama3_json",
        f'{{"name": "weather", "parameters": {ROME}}}; {{"name": "now", "parameters": {{}}}}',
        Answer("", "", [LOOK, NOW]),
    ),
    "llama3_json after its tag": Recorded(
        None,
        "llama3_json",
        f'Hm.<|python_tag|>{{"type": "function", "name": "weather", "parameters": {ROME}}}',
        Answer("Hm.", "", [LOOK]),
    ),
    "llama3_json, an object that is no call": Recorded(
        None,
        "llama3_json",
        'It is {"name": "Ada", "born": 1815} and {"a": {"b": 1}}, {x}.',
        Answer('It is {"name": "Ada", "born": 1815} and {"a": {"b": 1}}, {x}.', "", []),
    ),
    "pythonic": Recorded(
        None,
        "pythonic",
        "[weather(city='R\\u00f6m \\'\"', days=[1, -2.5, None, (True,)], where={'a': {1000: 16}}), now()]",
        Answer(
            "",
            "",
            [
                ("weather", '{"city": "Röm \'\\"", "days": [1, -2.5, null, [true]], "where": {"a": {"1000": 16}}}'),
                NOW,
            ],
        ),
    ),
    "pythonic, no call": Recorded(
        None, "pythonic", "[1] means now(), [now]\n", Answer("[1] means now(), [now]\n", "", [])
    ),
    "pythonic, cut": Recorded(
        None,
        "pythonic",
        "<|python_start|>[now(), weather(city='Ro",
        Answer("", "", [NOW, ("weather", '{"city": "Ro…')]),
    ),
    "pythonic, broken": Recorded(
        None,
        "pythonic",
        "[weather(city=<Rome>, days=1)] ok",
        Answer(" ok", "", [("weather", '{"city": <Rome>, days=1')]),
    ),
    "pythonic, bare words": Recorded(
        None,
        "pythonic",
        "[weather(city=Rome, days=nan, at={a: b}), now()] ok",
        Answer(" ok", "", [("weather", '{"city": "Rome", "days": "nan", "at": {"a": "b"}}'), NOW]),
    ),
    "mistral": Recorded(
        None,
        "mistral",
        f'Hm.[TOOL_CALLS] [{{"name": "weather", "arguments": {ROME}}}, {{"name": "now", "arguments": {{}}}}]',
        Answer("Hm.", "", [LOOK, NOW]),
    ),
    "mistral, names": Recorded(
        None,
        "mistral",
        f"[TOOL_CALLS]weather[ARGS]{ROME}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}[TOOL_CALLS]now{{}}",
        Answer("", "", [LOOK, NOW, NOW]),
    ),
    "mistral, no call": Recorded(None, "mistral", "[TOOL_CALLS] nothing to call", Answer(" nothing to call", "", [])),
    "deepseek v3": Recorded(
        None,
        "deepseek",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{ROME}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Answer("Hm.", "", [LOOK, NOW]),
    ),
    "deepseek v3, a brace is missing": Recorded(
        None,
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Rome"\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        Answer("", "", [("weather", '{"city": "Rome"\n')]),
    ),
    "deepseek v3.1": Recorded(
        None,
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ROME}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Answer("", "", [LOOK, NOW]),
    ),
    "glm45": Recorded(
        "qwen3",
        "glm45",
        '\n<think>Hm.</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>42 "</tool_call>\n'
        "</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>where</arg_key>\n<arg_value>here</arg_value>\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
        Answer(
            "I look.",
            "Hm.",
            [("weather", '{"city": "42 \\"</tool_call>\\n", "days": 3, "where": "here"}'), NOW],
        ),
    ),
    "glm45, cut": Recorded(
        None,
        "glm45",
        "<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>city</arg_key><arg_value>Ro",
        Answer("", "", [("weather", '{"days": 3, "city": "Ro…')]),
    ),
    "glm45, a marker in a string": Recorded(
        None,
        "glm45",
        '<tool_call>weather\n<arg_key>where</arg_key>\n<arg_value>["\\"</arg_value>", 1]</arg_value>\n</tool_call>',
        Answer("", "", [("weather", '{"where": ["\\"</arg_value>", 1]}')]),
    ),
    "minimax_m2": Recorded(
        "qwen3",
        "minimax_m2",
        'Hm.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">\n 4 "<b>" \n'
        '</parameter>\n<parameter name="days">3</parameter>\n<parameter name="where">{"</parameter>": [null]}'
        '</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        Answer(
            "I look.",
            "Hm.",
            [("weather", '{"city": "\\n 4 \\"<b>\\" \\n", "days": 3, "where": {"</parameter>": [null]}}'), NOW],
        ),
        "]~b]ai\n<think>\n",
    ),
    "minimax_m2, cut": Recorded(
        None,
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="days">3</parameter>\n'
        '<parameter name="city">Ro</par',
        Answer("", "", [("weather", '{"days": 3, "city": "Ro…')]),
    ),
    "kimi_k2": Recorded(
        "qwen3",
        "kimi_k2",
        "Hm.</think>I look.<|tool_calls_section_begin|>"
        "<|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>"
        f"{ROME}<|tool_call_end|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        Answer("I look.", "Hm.", [LOOK, NOW]),
        "<think>",
    ),
    "lfm2": Recorded(
        None,
        "lfm2",
        "I look.<|tool_call_start|>"
        """[weather(city="R'ome", days=3, where=[None, {'a': True}]), now()]<|tool_call_end|>"""
        "[1]",
        Answer("I look.[1]", "", [("weather", """{"city": "R'ome", "days": 3, "where": [null, {"a": true}]}"""), NOW]),
    ),
    "nemotron": Recorded(
        "qwen3",
        "nemotron",
        f'<think>\nHm.\n</think>\n\nI look.\n\n<TOOLCALL>[{{"name": "weather", "arguments": {ROME}}}, '
        '{"name": "now", "arguments": {}}]</TOOLCALL>',
        Answer("I look.", "Hm.", [LOOK, NOW]),
    ),
    "qwen3_coder": Recorded(
        "qwen3",
        "qwen3_coder",
        "Hm.\n</think>\n\nI look.\n<tool_call>\n<function=weather>\n<parameter=city>\n  4 <b>\n\n</parameter>\n"
        '<parameter=days>\n3\n</parameter>\n<parameter=where>\n{"</parameter>": [null]}\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        Answer(
            "I look.",
            "Hm.",
            [("weather", '{"city": "  4 <b>\\n", "days": 3, "where": {"</parameter>": [null]}}'), NOW],
        ),
        "<think>\n",
    ),
    "qwen3_coder without markers around calls": Recorded(
        None,
        "qwen3_coder",
        "<function=weather><parameter=city>Rome</parameter><parameter=where>here</parameter></function> <function=now>"
        "</function>\n</tool_call> ok",
        Answer(" ok", "", [("weather", '{"city": "Rome", "where": "here"}'), NOW]),
    ),
    "qwen3_coder, cut": Recorded(
        None,
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\nRo",
        Answer("", "", [("weather", '{"days": 3, "city": "Ro…')]),
    ),
    "qwen3_coder, no call": Recorded(
        None,
        "qwen3_coder",
        "A <tool_call>not one</tool_call>, <function=a b>",
        Answer("A not one, a b>", "", []),
    ),
    "gpt_oss": Recorded(
        "gpt_oss",
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ROME}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}<|call|>",
        Answer("I look.", "Hm, <b>.", [LOOK, NOW]),
    ),
    "gpt_oss without tools": Recorded(
        "gpt_oss",
        None,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        Answer("Yes.", "Hm.", []),
    ),
    **{
        f"hermes, {name}": Recorded(None, "hermes", text, Answer("", "", [("now", "{}")] * count))
        for name, count, text in (
            ("half a closer", 1, '<tool_call>{"name": "now", "arguments": {}}</tool'),
            (
                "a doubled closer",
                1,
                '<tool_call>{"name": "now", "arguments": {}}</tool_call></tool_call>\n</tool_call>',
            ),
            ("a brace too many", 1, '<tool_call>{"name": "now", "arguments": {}}}\n</tool_call>\n'),
            ("an extra brace after the closer", 1, '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n}'),
            ("the outer brace is missing", 1, '<tool_call>{"name": "now", "arguments": {}</tool_call>'),
            ("no closer", 2, '<tool_call>{"name": "now"}\n<tool_call>{"name": "now"}'),
            ("two openers", 1, '<tool_call>\n<tool_call>{"name": "now"}</tool_call>'),
            ("half a closer within", 2, '<tool_call>{"name": "now"}</tool\n<tool_call>{"name": "now"}</tool_call>'),
            ("two lines", 2, '<tool_call>\n{"name": "now"}\n{"name": "now"}\n</tool_call>'),
            ("two with a comma", 2, '<tool_call>{"name": "now"}, {"name": "now"}</tool_call>'),
            ("wrapped", 1, '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}</tool_call>'),
            (
                "wrapped twice",
                2,
                '<tool_call>[{"function": {"name": "now"}}, {"function": {"name": "now"}}]</tool_call>',
            ),
            ("function for name", 1, '<tool_call>{"function": "now", "parameters": {}}</tool_call>'),
            ("a block of code", 1, '<tool_call>\n```json\n{"name": "now"}\n```\n</tool_call>'),
            ("cut in a list", 1, '<tool_call>[{"name": "now"}, {"na'),
        )
    },
    "llama3_json, a list in a block of code": Recorded(
        None,
        "llama3_json",
        'I look.\n```json\n[{"name": "now", "parameters": {}}, {"name": "now", "parameters": {}}]\n```\nok',
        Answer("I look.ok", "", [NOW, NOW]),
    ),
    "llama3_json, an unknown tool": Recorded(
        None, "llama3_json", '<|python_tag|>{"name": "rain", "parameters": {}}', Answer("", "", [("rain", "{}")])
    ),
    "llama3_json, other code": Recorded(
        None, "llama3_json", "So:\n```c\nx = [1, {2}];\n```\n", Answer("So:\n```c\nx = [1, {2}];\n```\n", "", [])
    ),
    "pythonic, two lists in a block of code": Recorded(
        None, "pythonic", "```python\n[now(), ]\n[now()]\n```", Answer("", "", [NOW, NOW])
    ),
    "pythonic after text": Recorded(
        None,
        "pythonic",
        "Hm. <|python_start|>[rain(a=1]<|python_end|> ok",
        Answer("Hm. ok", "", [("rain", '{"a": 1}')]),
    ),
    "mistral, one object": Recorded(
        None, "mistral", '[TOOL_CALLS] {"name": "now"}}[TOOL_CALLS][{"name": "now"}', Answer("", "", [NOW, NOW])
    ),
    "qwen3, thinking twice": Recorded(
        "qwen3", "hermes", "<think>\n\n</think>\n\n<think>Hm.</think></think>Yes </think>.", Answer("Yes .", "Hm.", [])
    ),
    "gpt_oss, doubled markers": Recorded(
        "gpt_oss",
        "gpt_oss",
        "<|channel|>analysis<|message|><|message|>Hm.<|end|><|end|><|start|><|start|>assistant<|channel|>final<|message|>"
        "Yes<|constrain|>.<|return|><|return|> and",
        Answer("Yes. and", "Hm.", []),
    ),
    "gpt_oss without headers": Recorded("gpt_oss", None, "Yes, to=me.", Answer("Yes, to=me.", "", [])),
}
