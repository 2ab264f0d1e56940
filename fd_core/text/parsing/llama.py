"""Calls of Llama 3: a JSON object without a marker, or behind `<|python_tag|>`."""

from __future__ import annotations

import json
from typing import Final

from fd_core.text.parsing.contract import CallForm
from fd_core.text.parsing.json_calls import JsonCallReader
from fd_core.text.parsing.reader import Steps

__all__ = ["LlamaJsonTools"]

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
        while marker := (yield from self.content_until(_TAG, "{")):
            before = self.space_before
            if marker == "{":
                self.skip(-1)
            else:
                before += yield from self.space()
            begun = False
            while (yield from self.json_call(known=True)):
                begun = True
                yield from self.rest_of_call(_TAG)
                yield from self.space()
                if not (yield from self.literal(";", ",")):
                    break
                yield from self.space()
            if not begun:
                self.say_content(before + (yield from self.literal("{")))
