"""Calls whose arguments stand one by one between markers, and become a JSON object."""

from __future__ import annotations

import json
from typing import ClassVar

from fd_core.text.parsing.argument_types import json_of, kinds_of, parameter_schema
from fd_core.text.parsing.contract import TaggedArguments, ToolParser, ToolSchemas
from fd_core.text.parsing.reader import Steps, TextReader


class TaggedCallReader(TextReader, ToolParser):
    """Values of arguments that can only be strings go out as they come, others when they are complete."""

    tagged: ClassVar[TaggedArguments]

    def __init__(self, tools: ToolSchemas) -> None:
        ToolParser.__init__(self, tools)
        TextReader.__init__(self)

    def argument(self, tool: str, key: str, said: str) -> Steps[bool]:
        """Say one argument, of which the value comes next, behind `said`; false if the text ended before it did."""
        self.say_arguments(f"{said}{json.dumps(key, ensure_ascii=False)}: ")
        schema = self.tools.get(tool, {})
        kinds = kinds_of(parameter_schema(schema, key), schema)
        ends = self.tagged.ends
        if kinds == {"string"}:
            self.say_arguments('"')
            closed = yield from self.until(*ends, say=lambda text: self.say_arguments(_escaped(text)))
            self.say_arguments('"' if closed else "")
            return bool(closed)
        value, closed = yield from self.text_until(*ends)
        quotes = _Quotes() if value.lstrip()[:1] in ("[", "{", '"') else None
        while closed and quotes is not None and quotes.open_after(value[quotes.seen :]):
            more, again = yield from self.text_until(*ends)  # the marker stood in a string
            value += closed + more
            closed = again
        if closed:  # half a value of another type may be anything
            self.say_arguments(json_of(value, kinds))
        return bool(closed)


class _Quotes:
    """Whether JSON that comes in pieces is within a string."""

    def __init__(self) -> None:
        self.seen = 0
        self._inside = self._escaped = False

    def open_after(self, more: str) -> bool:
        self.seen += len(more)
        for character in more:
            if self._escaped:
                self._escaped = False
            elif character == '"':
                self._inside = not self._inside
            else:
                self._escaped = self._inside and character == "\\"
        return self._inside


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
