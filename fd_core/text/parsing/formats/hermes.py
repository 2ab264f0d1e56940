"""Calls between `<tool_call>` and `</tool_call>`, as JSON objects."""

from __future__ import annotations

import json
from typing import ClassVar, Final

from fd_core.text.parsing.contract import CallForm
from fd_core.text.parsing.json_calls import JsonCallReader
from fd_core.text.parsing.reader import Steps

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"


class HermesTools(JsonCallReader):
    """Hermes, Qwen 2.5 and 3, and SmolLM, which puts a list of calls between the markers."""

    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _END)
    around: ClassVar[tuple[str, ...]] = ()
    """Markers around content."""

    @classmethod
    def form(cls, name: str) -> CallForm:
        """Return the form that Qwen's template writes."""
        return CallForm(_BEGIN, f'{_BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{_END}", "\n")

    def run(self) -> Steps[None]:
        """Read content and calls in turn."""
        while marker := (yield from self.content_until(_BEGIN, *self.around)):
            if marker == _BEGIN:
                yield from self.json_calls()
            else:
                yield from self.space()


class ErnieTools(HermesTools):
    """ERNIE-4.5, which writes content between `<response>` and `</response>`."""

    markers = (_BEGIN, _END, "<response>", "</response>")
    around = ("<response>", "</response>")
