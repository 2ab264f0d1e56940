"""The bytes that each token stands for, so that text can be decoded token by token.

Two families cover the architectures we serve: byte-level BPE (GPT-2's alphabet of 256 printable characters) and
SentencePiece-style BPE (`▁` for a space, `<0xAB>` for a byte that has no token).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens become bytes.

    `to_bytes` is `byte_level` or `sentencepiece`. With `drops_first_space`, a text that begins at the first token
    loses one leading space, which the encoder put there.
    """

    to_bytes: Callable[[str], bytes]
    drops_first_space: bool = False


@cache
def _alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-ins: visible Latin-1 stands for itself, the rest is moved above U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def byte_level(token: str) -> bytes:
    """Return the bytes of a byte-level token; a token with other characters stands for its own UTF-8."""
    alphabet = _alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def sentencepiece(token: str) -> bytes:
    """Return the bytes of a SentencePiece-style token."""
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes([int(byte.group(1), 16)])
    return token.replace(_SPACE, " ").encode("utf-8", "replace")


def decoding_of(decoder: Any) -> Decoding | None:
    """Read the family from the `decoder` of a tokenizer.json; None if it is neither."""
    if not isinstance(decoder, Mapping):
        return None
    steps = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    if not isinstance(steps, list):
        return None
    kinds = {str(step.get("type")): step for step in steps if isinstance(step, Mapping)}
    if "ByteLevel" in kinds:
        return Decoding(byte_level)
    if "Metaspace" in kinds:
        scheme = kinds["Metaspace"].get("prepend_scheme", "always")
        return Decoding(sentencepiece, drops_first_space=scheme != "never")
    if "ByteFallback" in kinds:
        strip = kinds.get("Strip", {})
        return Decoding(sentencepiece, drops_first_space=bool(strip.get("start")))
    return None
