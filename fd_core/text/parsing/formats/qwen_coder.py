"""Calls of Qwen3-Coder: a function and its parameters between tags with names, which become a JSON object."""

from __future__ import annotations

import re
from typing import Final

from fd_core.text.parsing.contract import CallForm, TaggedArguments
from fd_core.text.parsing.reader import Steps
from fd_core.text.parsing.tagged import TaggedCallReader

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
        while (yield from self.content_until(_CALL)):
            self.mark(self.space_before)
            name = yield from self.match(_NAME)
            if name and (yield from self.literal(">")):
                self.forget()
                self.begin_call(name)
                yield from self._arguments_of(name)
            else:
                self.say_read()

    def _arguments_of(self, name: str) -> Steps[None]:
        said = "{"
        while (marker := (yield from self.until(_KEY, _CALL_END, _END, _BEGIN, _CALL, say=self.drop))) == _KEY:
            key, closed = yield from self.text_until(">", *self.markers)
            if closed != ">":
                self.skip(-len(closed))
                continue
            yield from self.literal("\n")
            if not (yield from self.argument(name, key, said)):
                return
            said = ", "
        if marker:
            self.say_arguments("}" if said == ", " else "{}")
            self.end_call()
            self.skip(-len(marker))
