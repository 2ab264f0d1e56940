"""Calls of Llama 3: a JSON object without a marker, or behind `<|python_tag|>`."""

from __future__ import annotations

import json
from typing import Final

from fd_core.text.parsing.contract import CallForm
from fd_core.text.parsing.json_calls import JsonCallReader
from fd_core.text.parsing.reader import Steps

_TAG: Final = "<|python_tag|>"


class LlamaJsonTools(JsonCallReader):
    """An object with the name of a tool and its parameters is a call, wherever it stands; several follow a `;`."""

    markers = (_TAG,)

    @classmethod
    def form(cls, name: str) -> CallForm:
        """Return the form that Llama's prompt asks for."""
        return CallForm('{"name": ', f'{{"name": {json.dumps(name)}, "parameters": ', "}", "; ")

    def run(self) -> Steps[None]:
        """Read content and calls in turn."""
        while marker := (yield from self.content_until(_TAG, "{", "[", "```")):
            if marker != _TAG:
                self.skip(-len(marker))
            yield from self.json_calls(known=marker != _TAG)
