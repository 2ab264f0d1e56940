"""Reasoning between two markers, before the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from fd_core.text.parsing.contract import ReasoningParser
from fd_core.text.parsing.events import Content, Event
from fd_core.text.parsing.reader import Steps, TextReader

_OPENINGS: Final = ("{", "[", '"', "<", "`")
"""JSON, a call or a block of code may begin with these. After them markers may be part of strings and are kept."""


class _Between(TextReader, ReasoningParser):
    """Reasoning is enclosed in `begin` and `end`; white space around the markers belongs to them."""

    begin: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    markers: ClassVar[tuple[str, ...]] = ("<think>", "</think>")
    sample = "<think>\nHm.\n</think>\n\nI look."
    around: ClassVar[tuple[str, ...]] = ()
    """Markers around content."""
    unasked: ClassVar[bool] = False
    """True if an answer begins with reasoning even without a marker."""

    def __init__(self, prompt_tail: str) -> None:
        ReasoningParser.__init__(self, prompt_tail)
        self._inside = self._opened_by(prompt_tail)
        self._passing = False
        TextReader.__init__(self)

    @classmethod
    def begins_reasoning(cls, prompt_tail: str, switched: bool) -> bool:
        """Return True if the prompt opened reasoning, or left it to the model."""
        return cls._opened_by(prompt_tail) or (switched and cls.end not in prompt_tail)

    @classmethod
    def _opened_by(cls, prompt_tail: str) -> bool:
        begun, ended = prompt_tail.rfind(cls.begin), prompt_tail.rfind(cls.end)
        return begun > ended or (begun == ended and cls.unasked)

    def push(self, text: str) -> Sequence[Event]:
        """Take more text; after the reasoning it passes through unchanged."""
        if self._passing:
            return (Content(text),) if text else ()
        return super().push(text)

    def run(self) -> Steps[None]:
        inside = self._inside
        while True:
            self.mark()
            yield from self.space()
            begun = not self.at_end  # otherwise the text is only white space
            if not (yield from self.literal(self.begin)) and not inside:
                break
            inside = False
            self.forget()
            yield from self.space()
            yield from self.until(self.end, emit=self.emit_reasoning, space=True)
            while (yield from self.space()) or (yield from self.literal(self.end)):
                pass
        self.emit_read(cut=begun)
        while (marker := (yield from self.content_until(*_OPENINGS, *self.around))) in self.around:
            yield from self.space()
        if not marker:
            return
        self.skip(-1)
        self.emit_content(self.space_before)
        if self.around:
            while (yield from self.until(*self.around, emit=self.emit_content, space=True)):
                yield from self.space()
        self._passing = True
        self.emit_content(self.rest())


class QwenReasoning(_Between):
    """Qwen3 and others: reasoning between `<think>` and `</think>`, if the template or the model opens it."""


class DeepSeekR1Reasoning(_Between):
    """DeepSeek R1: the answer begins with reasoning, even without a `<think>`."""

    unasked = True


class MistralReasoning(_Between):
    """Magistral and Ministral: reasoning between `[THINK]` and `[/THINK]`."""

    begin = "[THINK]"
    end = "[/THINK]"
    markers = ("[THINK]", "[/THINK]")
    sample = "[THINK]Hm.[/THINK]I look."


class ErnieReasoning(_Between):
    """ERNIE-4.5: reasoning ends with `</think>`, and the answer is enclosed in `<response>` and `</response>`."""

    unasked = True
    around = ("<response>", "</response>")
    markers = ("<think>", "</think>", *around)
    sample = "Hm.\n</think>\n\n\n<response>\nI look.\n</response>\n"
