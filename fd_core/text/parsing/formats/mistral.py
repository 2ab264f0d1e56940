"""Calls behind `[TOOL_CALLS]`: a JSON list of calls, or a name and `[ARGS]` before each call's arguments."""

from __future__ import annotations

import re
from typing import Final

from fd_core.text.parsing.contract import CallForm
from fd_core.text.parsing.json_calls import JsonCallReader
from fd_core.text.parsing.reader import Steps

_CALLS: Final = "[TOOL_CALLS]"
_ARGS: Final = "[ARGS]"
_ID: Final = "[CALL_ID]"
_NAME: Final = re.compile(r"[\w.-]+")


class MistralTools(JsonCallReader):
    """Mistral's models, older tokenizers and newer ones."""

    markers = (_CALLS, _ARGS, _ID)
    bare_ids = True

    @classmethod
    def form(cls, name: str) -> CallForm:
        """Return the form of the newer tokenizers; older ones write lists, which are read as well."""
        return CallForm(_CALLS, f"{_CALLS}{name}{_ARGS}", "", "")

    def run(self) -> Steps[None]:
        """Read content and calls in turn."""
        while (yield from self.content_until(_CALLS)):
            self.mark()
            yield from self.space()
            first = yield from self.peek()
            self.go_back()
            yield from self.json_calls() if first and first in "[{`" else self._named()

    def _named(self) -> Steps[None]:
        """Read a name and its arguments."""
        self.mark(self.space_before)
        yield from self.space()
        name = yield from self.match(_NAME)
        yield from self.space()
        between = yield from self.literal(_ID, _ARGS, "{")
        if between == _ID:
            yield from self.match(_NAME)
            between = yield from self.literal(_ARGS)
        if not name or not between:
            self.say_read()
            return
        if between == "{":
            self.skip(-1)
        self.forget()
        self.begin_call(name)
        yield from self.skip_all(_ARGS)
        if (yield from self.json_value()):
            self.end_call()
        yield from self.rest_of_call()
