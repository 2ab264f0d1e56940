"""Calls of GLM-4.5: a name, then keys and values between markers, which become a JSON object."""

from __future__ import annotations

import re
from typing import Final

from fd_core.text.parsing.contract import CallForm, TaggedArguments
from fd_core.text.parsing.reader import Steps
from fd_core.text.parsing.tagged import TaggedCallReader

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
            self.mark(self.space_before)
            yield from self.space()
            name = yield from self.match(_NAME)
            space = yield from self.space()
            marker = yield from self.literal(*self.markers)
            self.skip(-len(marker))
            if name and (marker or "\n" in space):
                self.forget()
                self.begin_call(name)
                yield from self._arguments_of(name)
            else:
                self.say_read()

    def _arguments_of(self, name: str) -> Steps[None]:
        said = "{"
        while (marker := (yield from self.until(_KEY[0], _BEGIN, _END, say=self.drop))) == _KEY[0]:
            yield from self.skip_all(_KEY[0])
            key, closed = yield from self.text_until(*self.markers)
            if closed in (_BEGIN, _END):
                self.skip(-len(closed))
                continue
            yield from self.skip_all(_KEY[1])
            if closed != _VALUE[0] and not (yield from self.literal(_VALUE[0])):
                continue
            if not (yield from self.argument(name, key, said)):
                return
            said = ", "
        if marker:
            self.say_arguments("}" if said == ", " else "{}")
            self.end_call()
            self.skip(-len(marker))
