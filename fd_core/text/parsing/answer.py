"""The parser of one answer: reasoning first, then tool calls in the content."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from fd_core.text.parsing.contract import OutputParser, ReasoningParser, ToolParser, ToolSchemas
from fd_core.text.parsing.events import Content, Event
from fd_core.text.tokenizer import Tokenizer

_TAIL_TOKENS: Final = 64
"""Tokens of a prompt in which reasoning is looked for: a template may write some text after its marker."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of a server's model; None where the model has none."""

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """Parsing settings for the answers to one request."""

    reasoning: type[ReasoningParser] | None
    tools: type[ToolParser] | None
    schemas: ToolSchemas
    parallel: bool = True
    """True if an answer may have more than one call; otherwise further calls are dropped."""
    show_reasoning: bool = True
    continues: bool = False
    """True if the answer continues content of the client, before which any reasoning has ended."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Control tokens that the parsers need in the text."""
        return tuple(marker for each in (self.reasoning, self.tools) if each is not None for marker in each.markers)

    def prompt_tail(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
        """Return the text of the end of a prompt: what follows the last control token that is no marker.

        Before it are other turns, such as the question what `<think>` means. Content that is continued may be of any
        length; it follows the end of reasoning, unless it opens another.
        """
        tail = prompt if self.continues else prompt[-_TAIL_TOKENS:]
        others = tokenizer.special_ids - {tokenizer.control_tokens.get(marker) for marker in self.markers}
        begin = next((at for at in range(len(tail), 0, -1) if tail[at - 1] in others), 0)
        text = tokenizer.decode(tail[begin:], skip_special=False)
        return self.reasoning.end + text if text and self.continues and self.reasoning is not None else text

    def parser(self, prompt_tail: str) -> AnswerParser:
        """Return the parser of one answer to a prompt that ends with `prompt_tail`."""
        reasoning = None if self.reasoning is None else self.reasoning(prompt_tail)
        return AnswerParser(reasoning, None if self.tools is None else self.tools(self.schemas))


class AnswerParser(OutputParser):
    """Chains a reasoning parser and a tool parser."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        if tools is not None and tools.reads_reasoning:
            reasoning = None
        self._first: OutputParser | None = tools if reasoning is None else reasoning
        self._second = None if reasoning is None else tools

    def push(self, text: str) -> Sequence[Event]:
        if self._first is None:
            return (Content(text),) if text else ()
        events = self._first.push(text)
        return events if self._second is None else self._read(events, self._second)

    def flush(self) -> Sequence[Event]:
        events = () if self._first is None else self._first.flush()
        return events if self._second is None else [*self._read(events, self._second), *self._second.flush()]

    def finish(self) -> Sequence[Event]:
        events = () if self._first is None else self._first.finish()
        return events if self._second is None else [*self._read(events, self._second), *self._second.finish()]

    @staticmethod
    def _read(events: Iterable[Event], tools: ToolParser) -> list[Event]:
        read: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                read += tools.push(event.text)
            else:
                read.append(event)
        return read


class ParserNames(NamedTuple):
    """Names of parsers; None where nothing fits."""

    tools: str | None
    reasoning: str | None


_TOOLS: Final = (
    ("<|channel|>", "gpt_oss"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|tool_call_start|>", "lfm2"),
    ("<TOOLCALL>", "nemotron"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<|python_start|>", "pythonic"),
    ("Environment: ipython", "llama3_json"),
    ("<tool_call>", "hermes"),
)
"""Text found in a chat template, and the tool-call parser of such models; the first match is used."""

_REASONING: Final = (
    ("<|channel|>", "gpt_oss"),
    ("<｜Assistant｜>", "deepseek_r1"),
    ("[THINK]", "mistral"),
    ("</think>", "qwen3"),
)


def parsers_for(template: str | None, supports_tools: bool, architecture: str = "") -> ParserNames:
    """Return the parsers for a template's source; without `supports_tools` of its own it gets hermes."""
    if template is None:
        return ParserNames(None, None)
    tools = next((name for mark, name in _TOOLS if mark in template), None)
    if tools == "deepseek" and "```json" not in template:
        tools = "deepseek_v31"
    reasoning = next((name for mark, name in _REASONING if mark in template), None)
    if reasoning == "deepseek_r1" and "</think>" not in template:
        reasoning = None
    if "ernie" in architecture.lower():
        tools, reasoning = "ernie45" if tools == "hermes" else tools, "ernie45" if reasoning else None
    return ParserNames(tools if supports_tools else "hermes", reasoning)
