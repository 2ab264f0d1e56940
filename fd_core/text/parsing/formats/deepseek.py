"""Calls of DeepSeek: between control tokens, with the arguments in a block of code (V3, R1) or bare (V3.1)."""

from __future__ import annotations

from typing import Final

from fd_core.text.parsing.contract import CallForm
from fd_core.text.parsing.json_calls import JsonCallReader
from fd_core.text.parsing.reader import Steps

_CALLS: Final = "<｜tool▁calls▁begin｜>"
_CALLS_END: Final = "<｜tool▁calls▁end｜>"
_CALL: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_SEP: Final = "<｜tool▁sep｜>"
_FENCE: Final = "```"
_FENCES: Final = (f"{_FENCE}json", _FENCE)


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
        while (yield from self.content_until(_CALL)):
            yield from self._call()

    def _call(self) -> Steps[None]:
        self.mark(self.space_before)
        name, marker = yield from self.text_until(*self.markers)
        if marker == _SEP:  # V3 writes the type of the tool first, V3.1 has its arguments here
            yield from self.skip_all(_SEP)
            behind, marker = yield from self.text_until("\n", "{", _FENCE, *self.markers)
            name = behind if behind.strip() else name
        self.skip(-len(marker))
        if not name.strip() or not marker:
            self.say_read()
            return
        self.forget()
        self.begin_call(name.strip())
        yield from self.skip_all(*_FENCES)
        if (yield from self.json_value()):
            self.end_call()
        yield from self.rest_of_call()
        yield from self.skip_all(*_FENCES)


class DeepSeekV31Tools(DeepSeekTools):
    """DeepSeek V3.1; reads both forms."""

    @classmethod
    def form(cls, name: str) -> CallForm:
        """Return the form of V3.1."""
        return CallForm(_CALLS, f"{_CALL}{name}{_SEP}", _CALL_END, "", opening=_CALLS, closing=_CALLS_END)
