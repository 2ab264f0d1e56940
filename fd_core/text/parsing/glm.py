"""Calls of GLM-4.5: a name, then keys and values between markers, which become a JSON object."""

from __future__ import annotations

import re
from typing import Final

from fd_core.text.parsing.contract import CallForm, TaggedArguments
from fd_core.text.parsing.reader import Steps
from fd_core.text.parsing.tagged import TaggedCallReader

__all__ = ["GlmTools"]

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_KEY: Final = ("<arg_key>", "</arg_key>")
_VALUE: Final = ("<arg_value>", "</arg_value>")
_NAME: Final = re.compile(r"[\w.-]+")


class GlmTools(TaggedCallReader):
    """GLM-4.5 and later."""

    markers = (_BEGIN, _END, *_KEY, *_VALUE)
    tagged = TaggedArguments(_KEY[0], f"{_KEY[1]}\n{_VALUE[0]}", f"{_VALUE[1]}\n", (_VALUE[1],))

    @classmethod
    def form(cls, name: str) -> CallForm:
        """Return the form that GLM's template writes."""
        return CallForm(_BEGIN, f"{_BEGIN}{name}\n", _END, "\n", arguments=cls.tagged)

    def run(self) -> Steps[None]:
        """Read content and calls in turn."""
        while (yield from self.content_until(_BEGIN)):
            opened = self.space_before + _BEGIN + (yield from self.space())
            name, marker = yield from self.text_until("\n", _KEY[0], _END)
            if _NAME.fullmatch(name.strip()) and marker:
                self.begin_call(name.strip())
                yield from self._arguments_of(name.strip(), marker)
            elif marker:
                self.say_content(opened + name + marker)

    def _arguments_of(self, name: str, marker: str) -> Steps[None]:
        said = "{"
        while True:
            if marker not in (_KEY[0], _END):
                marker = yield from self.until(_KEY[0], _END, say=self.drop)
            if marker == _END:
                self.say_arguments("}" if said == ", " else "{}")
                self.end_call()
            if marker != _KEY[0]:
                return
            key, closed = yield from self.text_until(_KEY[1])
            if not closed:
                return
            yield from self.space()
            marker = ""
            if not (yield from self.literal(_VALUE[0])):
                continue
            if not (yield from self.argument(name, key, said)):
                return
            said = ", "
