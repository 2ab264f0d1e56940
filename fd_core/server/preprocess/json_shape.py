"""How much a JSON text holds, counted before anything is made of it: decoders hold the interpreter while they work."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

SMALL_BYTES: Final = 64 * 1024
"""A body of this size is decoded in a few milliseconds whatever it holds."""
_MAX_CONTAINERS: Final = 32_768
"""Objects and arrays of one text, each of which takes about half a microsecond."""
_MAX_NAMES: Final = 65_536
_MAX_VALUES: Final = 131_072
_MAX_ESCAPES: Final = 2_000_000
_SLICE: Final = 1 << 20
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPENING: Final = b"{["


class JsonShape(NamedTuple):
    """Counts of what a JSON text holds, most of it outside its strings."""

    containers: int
    """Objects and arrays."""
    names: int
    """Fields of all objects."""
    commas: int
    escapes: int
    """Backslashes, anywhere."""


async def decodable(body: bytes, ids: int) -> bool:
    """Whether a body is decoded in tens of milliseconds; `ids` is how many numbers it may hold beyond the usual.

    Large bodies are counted on a thread, in numpy, which lets the event loop run meanwhile.
    """
    if len(body) <= SMALL_BYTES:
        return True
    shape = await asyncio.to_thread(shape_of, body)
    most = JsonShape(_MAX_CONTAINERS, _MAX_NAMES, _MAX_VALUES + ids, _MAX_ESCAPES)
    return all(count <= limit for count, limit in zip(shape, most, strict=True))


def shape_of(body: bytes) -> JsonShape:
    """Count what stands outside strings; of what is no JSON, any counts may be returned."""
    data = np.frombuffer(body, np.uint8)
    containers = names = commas = escapes = 0
    inside = False
    backslashes = 0
    """At the end of the slice before, next to each other."""
    for begin in range(0, len(data), _SLICE):
        part = data[begin : begin + _SLICE]
        quotes, backslashes = _quotes(part, backslashes)
        within = np.bitwise_xor.accumulate(quotes)
        if inside:
            within = ~within
        inside = bool(within[-1])
        outside = ~within
        escapes += int(np.count_nonzero(part == _BACKSLASH))
        containers += sum(int(np.count_nonzero((part == sign) & outside)) for sign in _OPENING)
        names += int(np.count_nonzero((part == _COLON) & outside))
        commas += int(np.count_nonzero((part == _COMMA) & outside))
    return JsonShape(containers, names, commas, escapes)


def _quotes(part: npt.NDArray[np.uint8], before: int) -> tuple[npt.NDArray[np.bool_], int]:
    """Return where strings begin or end, and how many backslashes stand at the end of `part`.

    A quote behind an odd number of backslashes belongs to its string; `before` of them stand in front of `part`.
    """
    quotes = part == _QUOTE
    escapes = part == _BACKSLASH
    if not before and not escapes.any():
        return quotes, 0
    places = np.arange(len(part))
    others = np.maximum.accumulate(np.where(escapes, -1 - before, places))
    """The last place up to here without a backslash."""
    found = np.flatnonzero(quotes)
    last = np.where(found > 0, others[found - 1], -1 - before)
    quotes[found[(found - 1 - last) % 2 == 1]] = False
    return quotes, int(places[-1] - others[-1])
