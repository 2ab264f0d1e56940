"""Whether two processes turn the same request into the same tokens."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import datetime
from typing import Final

import msgspec

from fd_core.errors import FdError
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.tokenizer import Tokenizer

__all__ = ["reading_of"]

_TEXT: Final = "The 3 quick (brown) foxes\n\n\tcouldn't jump; naïve 東京 🙂 <|im_start|>  over 12,345.67 dogs?"
_TURNS: Final = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
)
_SOME_DAY: Final = datetime(2001, 2, 3, 4, 5, 6)
"""For templates that ask for the date."""


def reading_of(tokenizer: Tokenizer, template: ChatTemplate | None) -> str:
    """Return a name for how texts and conversations become tokens.

    It is made of what comes out for some of them, so that it does not depend on the files that the tokenizer is from.
    """
    ids = [tokenizer.encode(_TEXT, add_special=special) for special in (True, False)]
    if template is not None:
        try:
            text = replace(template, now=lambda: _SOME_DAY).render(_TURNS)
        except FdError as error:  # such as a template without system messages; others refuse the same
            text = type(error).__name__
        ids.append(tokenizer.encode(text, add_special=False))
    return hashlib.blake2b(msgspec.json.encode(ids), digest_size=16).hexdigest()
