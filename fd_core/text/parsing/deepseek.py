"""Calls of DeepSeek: between control tokens, with the arguments in a block of code (V3, R1) or bare (V3.1)."""

from __future__ import annotations

from typing import Final

from fd_core.text.parsing.contract import CallForm
from fd_core.text.parsing.json_calls import JsonCallReader
from fd_core.text.parsing.reader import Steps

__all__ = ["DeepSeekTools", "DeepSeekV31Tools"]

_CALLS: Final = "<｜tool▁calls▁begin｜>"
_CALLS_END: Final = "<｜tool▁calls▁end｜>"
_CALL: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_SEP: Final = "<｜tool▁sep｜>"
_FENCE: Final = "```"


class DeepSeekTools(JsonCallReader):
    """DeepSeek V3, R1 and V3.1; reads both forms."""

    markers = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEP)

    @classmethod
    def form(cls, name: str) -> CallForm:
        """Return the form of V3 and R1."""
        begin = f"{_CALL}function{_SEP}{name}\n{_FENCE}json\n"
        return CallForm(_CALLS, begin, f"\n{_FENCE}{_CALL_END}", "\n", opening=_CALLS, closing=_CALLS_END)

    def run(self) -> Steps[None]:
        """Read content and calls in turn."""
        while marker := (yield from self.content_until(_CALLS, _CALL, _CALL_END, _CALLS_END)):
            if marker == _CALL:
                yield from self._call()

    def _call(self) -> Steps[None]:
        name, marker = yield from self.text_until(_SEP, _CALL_END, _CALLS_END)
        if marker != _SEP:
            self.say_content(name if marker else "")
            return
        fenced = (yield from self.peek()) != "{"
        if fenced:  # V3 writes the type of the tool first
            name, marker = yield from self.text_until("\n")
        if not marker:
            return
        self.begin_call(name.strip())
        if fenced and (yield from self.until("\n", "{", say=self.drop)) == "{":
            self.skip(-1)
        yield from self.space()
        if (yield from self.json_value()):
            self.end_call()
        elif (yield from self.rest_of_call(_FENCE + _CALL_END, _CALL_END)):
            return
        yield from self.space()
        yield from self.literal(_FENCE)
        yield from self.space()
        yield from self.literal(_CALL_END)


class DeepSeekV31Tools(DeepSeekTools):
    """DeepSeek V3.1; reads both forms."""

    @classmethod
    def form(cls, name: str) -> CallForm:
        """Return the form of V3.1."""
        return CallForm(_CALLS, f"{_CALL}{name}{_SEP}", _CALL_END, "", opening=_CALLS, closing=_CALLS_END)
