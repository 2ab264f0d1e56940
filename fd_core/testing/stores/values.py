"""Keys and values that stores and connectors move: bytes that expose truncation, mixing and misreading."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from fd_core.kv.stores.contract import Bytes

_CRC_POLYNOMIAL: Final = 0x1DB710641
"""Generator of CRC-32, lowest bit first: a multiple of it changes no checksum."""
_PATHS: Final = [
    b"a/b",
    b"a//b",
    b"../../../escape",
    b"/",
    b".",
    b"..",
    b"a\\b",
    b"%2e",
    b"{a}",
    b"%s",
    b"*",
    b"~",
    b"-",
    b"con",
]
_SPACES: Final = [b"k", b" k", b"k ", b"k\n", b"\tk", b"k\r", b"k\0", b"\0k", b"k\xa0", b"k\x85", b"\xef\xbb\xbfk"]
_BEGINNINGS: Final = [
    b"FDKV\1", b"\x1f\x8b\x08", b"x\x9c", b"\x80\x04.", b"None", b"null", b"$-1\r\n", b"\r\n", b"\0", b'"', b"\xff\xfe"
]  # fmt: skip
"""Beginnings of sealed, compressed, serialized, absent and encoded values."""


def draws(seed: int) -> random.Random:
    """Return reproducible random numbers."""
    return random.Random(seed)  # noqa: S311 - not for cryptography


def changed(base: bytes, place: int, number: int) -> bytes:
    """Return bytes of which one differs."""
    return base[:place] + bytes([(base[place] + number) % 256]) + base[place + 1 :]


def of_one_checksum(base: bytes, number: int) -> bytes:
    """Return bytes with the CRC-32 of `base`."""
    multiple = 0
    for bit in range(number.bit_length()):
        multiple ^= (_CRC_POLYNOMIAL << bit) * (number >> bit & 1)
    return (int.from_bytes(base, "little") ^ multiple).to_bytes(len(base), "little")


KEYS: Final[dict[str, tuple[Callable[[bytes, int], bytes], Callable[[int], int]]]] = {
    "random": (lambda base, n: draws(n).randbytes(len(base)), lambda length: 200 if length == 1 else 10_000),
    "first byte": (lambda base, n: changed(base, 0, n), lambda _: 256),
    "middle byte": (lambda base, n: changed(base, len(base) // 2, n), lambda _: 256),
    "last byte": (lambda base, n: changed(base, len(base) - 1, n), lambda _: 256),
    "one checksum": (of_one_checksum, lambda length: 1 << max(0, min(16, 8 * length - 32))),
    "one sum": (lambda base, n: bytes(range(n, len(base))) + bytes(range(n)), lambda length: length),
    "prefixes": (lambda base, n: base[: n + 1], lambda length: length),
    "zeros in front": (lambda _, n: bytes(n) + b"k", lambda length: length),
    "zeros at the end": (lambda _, n: b"k" + bytes(n), lambda length: length),
    "case of letters": (
        lambda base, n: bytes(ord("K") | (n >> bit & 1) << 5 for bit in range(len(base))),
        lambda length: 1 << min(16, length),
    ),
    "spaces": (lambda _, n: _SPACES[n], lambda _: len(_SPACES)),
    "paths": (lambda _, n: _PATHS[n], lambda _: len(_PATHS)),
}
"""By name: a function from a base of the length of keys and a number to a key, and how many it makes of a length."""


def keys_of(kind: str, length: int, count: int) -> list[bytes]:
    """Return different keys, of `length` bytes or of several lengths up to it."""
    make, _ = KEYS[kind]
    base = draws(length).randbytes(length)
    numbers, found = itertools.count(), dict[bytes, None]()
    while len(found) < count:  # short random keys repeat
        found[make(base, next(numbers))] = None
    return list(found)


CONTENTS: Final = ("random", "alike", "zeros", "like others", "the same")
"""Kinds of values: all different; equal except in the middle, and in their checksums; zero except at an end; that begin
like a sealed, compressed or serialized value; equal if they are as long."""


def value_of(kind: str, number: int, length: int) -> bytes:
    """Return value `number`, of `length` bytes, which differs from the other numbers if there is room."""
    if kind == "random":
        return draws(number * 1_000_003 + length).randbytes(length)
    if kind == "like others":
        return (_BEGINNINGS[number % len(_BEGINNINGS)] + draws(number).randbytes(length))[:length]
    base = bytes(length) if kind == "zeros" else draws(length).randbytes(length)
    if kind == "the same":
        return base
    place = max(0, length // 2 - 4 if kind == "alike" else (length - 2) * (number % 2))
    if kind == "alike" and length >= 8:
        return base[:place] + of_one_checksum(base[place : place + 8], number + 1 & 0xFFFF) + base[place + 8 :]
    mark = (number + 1 & 0xFFFF).to_bytes(2, "big") if length > 1 else bytes([number + 1 & 0xFF])
    return (base[:place] + mark + base[place + len(mark) :])[:length]


BUFFERS: Final[dict[str, Callable[[bytes], Any]]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": lambda part: memoryview(bytearray(b"--" + part + b"-"))[2 : 2 + len(part)],
    "array": lambda part: np.frombuffer(part, np.uint8).reshape((-1, 1) if part else 0).copy().data,
}
"""Kinds of buffers."""


def parts_of(value: bytes, count: int, buffer: str) -> Sequence[Bytes]:
    """Return a value in `count` parts of different lengths, some empty, the last one not."""
    draw = draws(len(value) * 31 + count)
    cuts = sorted(draw.randrange(max(1, len(value))) for _ in range(count - 1))
    return [BUFFERS[buffer](value[start:end]) for start, end in zip([0, *cuts], [*cuts, len(value)], strict=True)]


HEADER_BYTES: Final = 80
_NOISE: Final = draws(0).randbytes(6 << 20)


def sealed(key: bytes, version: int, length: int) -> tuple[bytes, memoryview]:
    """Return header and payload of a block: each seal has another header, the payload is that of the key."""
    begin = int.from_bytes(key[:8], "big") % (len(_NOISE) - length)
    header = b"FDKV\1" + key.ljust(32, b"\0")
    header += hashlib.shake_128(b"%b %d" % (key, version)).digest(HEADER_BYTES - len(header))
    return header, memoryview(_NOISE)[begin : begin + length]


def assert_hidden(value: bytes, error: Exception) -> None:
    """Raise `AssertionError` if the message of an error shows the beginning or the end of a value."""
    for part in (value[:8], value[-8:]) if len(value) >= 8 else ():
        shown = part.hex() in str(error) or repr(part)[2:-1] in str(error)
        assert not shown, f"the message of {type(error).__name__} shows a part of a value"


def assert_value(what: str, found: Bytes | None, expected: bytes | None) -> None:
    """Compare a whole value; the message names the first wrong byte, and no content. Raises `AssertionError`."""
    got = None if found is None else bytes(found)
    if found is not None:
        view = memoryview(found)
        assert view.format == "B" and view.ndim == 1, f"{what}: expected bytes, got elements of format {view.format!r}"
    if got == expected:
        return
    names = ["no value" if each is None else f"{len(each):,} bytes" for each in (expected, got)]
    message = f"{what}: expected {names[0]}, got {names[1]}"
    if got and expected:
        both = min(len(got), len(expected))
        differ = np.frombuffer(got, np.uint8, both) != np.frombuffer(expected, np.uint8, both)
        message += f", which differ from byte {differ.argmax():,}" if differ.any() else ""
    raise AssertionError(message)
