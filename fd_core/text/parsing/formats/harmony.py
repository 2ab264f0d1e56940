"""The harmony format of gpt-oss: messages with a header, whose channel gives the purpose of a message."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar, Final

from fd_core.text.parsing.contract import CallForm, FreePart, ReasoningParser, ToolSchemas
from fd_core.text.parsing.formats.json_calls import JsonCallReader
from fd_core.text.parsing.reader import Steps

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_CONSTRAIN: Final = "<|constrain|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_TO: Final = " to="
_FUNCTION: Final = "functions."
_FIND_CHANNEL: Final = re.compile(r"<\|channel\|>\s*([a-z]+)")
_FIND_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")


class HarmonyTools(JsonCallReader):
    """`analysis` is reasoning, `final` and `commentary` are content, a message to a function is a call."""

    markers = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
    sample = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Rome"}<|call|><|start|>assistant to=functions.now<|channel|>commentary<|message|>{}<|call|>'
    )
    reads_reasoning = True
    before_calls = tuple(
        FreePart(f"{_CHANNEL}{channel}{_MESSAGE}", _ENDS[0], f"{_START}assistant")
        for channel in ("analysis", "commentary")
    )
    answer_begin = f"{_CHANNEL}final{_MESSAGE}"
    calls: ClassVar[bool] = True
    """True if messages to functions are calls; otherwise they are content."""

    @classmethod
    def form(cls, name: str) -> CallForm:
        begin = f"{_CHANNEL}commentary{_TO}{_FUNCTION}{name} <|constrain|>json{_MESSAGE}"
        return CallForm(_CHANNEL, begin, "", between=None)

    def run(self) -> Steps[None]:
        """Read messages; text that begins without a header is content."""
        self.mark()
        first = yield from self.literal(_CHANNEL, _START, _MESSAGE, _TO)
        if first != _START:
            self.go_back()
        self.forget()
        if first:
            yield from self._message()
        while marker := (yield from self.content_until(_CHANNEL, _START)):
            self.skip(-len(marker) if marker == _CHANNEL else 0)
            yield from self._message()

    def _message(self) -> Steps[None]:
        header, marker = yield from self.text_until(_MESSAGE, _START, *_ENDS)
        self.skip(-len(marker) if marker == _START else 0)
        if marker != _MESSAGE:
            return
        channel = (_FIND_CHANNEL.findall(header) or [""])[-1]
        recipient = (_FIND_RECIPIENT.findall(header) or [""])[-1]
        if recipient.startswith(_FUNCTION) and self.calls:
            yield from self._call(recipient.removeprefix(_FUNCTION))
            return
        builtin = recipient not in ("", "assistant") and not recipient.startswith(_FUNCTION)
        silent = builtin or channel == "analysis"
        yield from self._body(self.emit_reasoning if silent else self.emit_content)

    def _body(self, emit: Callable[[str], None]) -> Steps[None]:
        while (marker := (yield from self.until(*self.markers, emit=emit))) in (_CONSTRAIN, _MESSAGE):
            pass
        self.skip(-len(marker))

    def _call(self, name: str) -> Steps[None]:
        self.begin_call(name)
        yield from self.skip_all(_MESSAGE)
        if (yield from self.json_value()):
            self.end_call()
            yield from self._body(self.drop)
        yield from self.rest_of_call()


class HarmonyReasoning(HarmonyTools, ReasoningParser):
    """gpt-oss for requests without tools."""

    sample = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>I look.<|return|>"
    end = "<|channel|>final<|message|>"
    calls = False

    def __init__(self, prompt_tail: str) -> None:
        ReasoningParser.__init__(self, prompt_tail)
        no_tools: ToolSchemas = {}
        HarmonyTools.__init__(self, no_tools)

    @classmethod
    def begins_reasoning(cls, prompt_tail: str, switched: bool) -> bool:
        """Return True unless the prompt has the beginning of the final message, which the answer continues."""
        last = max(prompt_tail.rfind(marker) for marker in (_START, *_ENDS))
        return cls.end not in prompt_tail[last + 1 :]
