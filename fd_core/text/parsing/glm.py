"""Calls of GLM-4.5: a name, then keys and values between markers, which become a JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from fd_core.text.parsing.contract import ToolParser, ToolSchemas
from fd_core.text.parsing.reader import Steps, TextReader

__all__ = ["GlmTools"]

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_KEY: Final = ("<arg_key>", "</arg_key>")
_VALUE: Final = ("<arg_value>", "</arg_value>")
_NAME: Final = re.compile(r"[\w.-]+")
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


class GlmTools(TextReader, ToolParser):
    """GLM-4.5 and later. Values of parameters that are strings go out as they come, others when they are complete."""

    markers = (_BEGIN, _END, *_KEY, *_VALUE)

    def __init__(self, tools: ToolSchemas) -> None:
        ToolParser.__init__(self, tools)
        TextReader.__init__(self)

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
            self.say_arguments(f"{said}{json.dumps(key, ensure_ascii=False)}: ")
            said = ", "
            if _only_text(self._schema(name, key)):
                self.say_arguments('"')
                if not (yield from self.until(_VALUE[1], say=lambda text: self.say_arguments(_escaped(text)))):
                    return
                self.say_arguments('"')
                continue
            value, closed = yield from self.text_until(_VALUE[1])
            if not closed:  # half a value of another type may be anything
                return
            self.say_arguments(_json(value))

    def _schema(self, name: str, key: str) -> Any:
        properties = self.tools.get(name, {}).get("properties")
        return properties.get(key) if isinstance(properties, Mapping) else None


def _only_text(schema: Any) -> bool:
    """Whether a value of this schema can be nothing but a string."""
    if not isinstance(schema, Mapping):
        return False
    kind, choices = schema.get("type"), schema.get("enum")
    if kind is None and isinstance(choices, list):
        return bool(choices) and all(isinstance(choice, str) for choice in choices)
    return kind in ("string", ["string"])


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json(value: str) -> str:
    text = _WORDS.get(value.strip(), value.strip())
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return text
