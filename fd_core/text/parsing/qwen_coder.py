"""Calls of Qwen3-Coder: a function and its parameters between tags with names, which become a JSON object."""

from __future__ import annotations

import re
from typing import Final

from fd_core.text.parsing.contract import CallForm, TaggedArguments
from fd_core.text.parsing.reader import Steps
from fd_core.text.parsing.tagged import TaggedCallReader

__all__ = ["QwenCoderTools"]

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_CALL: Final = "<function="
_CALL_END: Final = "</function>"
_KEY: Final = "<parameter="
_VALUE_END: Final = "</parameter>"
_NAME: Final = re.compile(r"[\w.-]+")


class QwenCoderTools(TaggedCallReader):
    """Qwen3-Coder and later. The markers around a call may be missing, as the models sometimes leave them out."""

    markers = (_BEGIN, _END, _CALL, _CALL_END, _KEY, _VALUE_END)
    tagged = TaggedArguments(_KEY, ">\n", f"\n{_VALUE_END}\n", (f"\n{_VALUE_END}", _VALUE_END))

    @classmethod
    def form(cls, name: str) -> CallForm:
        """Return the form that the template asks for."""
        begin = f"{_BEGIN}\n{_CALL}{name}>\n"
        return CallForm(_BEGIN, begin, f"{_CALL_END}\n{_END}", "\n", arguments=cls.tagged)

    def run(self) -> Steps[None]:
        """Read content and calls in turn."""
        while marker := (yield from self.content_until(_BEGIN, _CALL)):
            opened = self.space_before + marker
            if marker == _BEGIN:
                space = yield from self.space()
                marker = yield from self.literal(_CALL)
                opened += space + marker
            if not marker:
                self.say_content("" if self.at_end else opened)
                continue
            name, closed = yield from self.text_until(">", _CALL_END, _END)
            if closed == ">" and _NAME.fullmatch(name):
                self.begin_call(name)
                yield from self._arguments_of(name)
            elif closed:
                self.say_content(opened + name + closed)

    def _arguments_of(self, name: str) -> Steps[None]:
        said = "{"
        while True:
            marker = yield from self.until(_KEY, _CALL_END, _END, say=self.drop)
            if marker in (_CALL_END, _END):
                self.say_arguments("}" if said == ", " else "{}")
                self.end_call()
                if marker == _CALL_END:
                    yield from self.space()
                    yield from self.literal(_END)
            if marker != _KEY:
                return
            key, closed = yield from self.text_until(">")
            if not closed:
                return
            yield from self.literal("\n")
            if not (yield from self.argument(name, key, said)):
                return
            said = ", "
