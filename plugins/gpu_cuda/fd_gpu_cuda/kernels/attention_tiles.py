"""How attention is cut: keys into chunks and tiles, queries into tiles, rows into splits. Pure arithmetic.

What decides bits depends on the model alone: which keys are summed up together. What fits a device, how many loads are
under way and how many programs share a row, decides none.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = [
    "CHUNK",
    "LARGE_CHUNK",
    "LARGE_FROM",
    "MOST_DRAFTED",
    "Tile",
    "chunk_of",
    "decode_tile",
    "most_chunks",
    "power_of_2",
    "prefill_tile",
    "splits_of",
]

CHUNK: Final = 256
"""Keys that are summed up from scratch, by their positions."""
LARGE_CHUNK: Final = 1024
LARGE_FROM: Final = 8192
"""Chunks are large from this position on: a row so long has enough of them, and there are fewer sums to fold."""
MOST_DRAFTED: Final = 8
"""Tokens of a row up to which it counts as a decode: its chunks are divided among programs."""

_LINES: Final = 16
"""Least lines that tensor cores multiply."""
_DECODE_LINES: Final = 32
_PREFILL_LINES: Final = 128
_TILE_BYTES: Final = 16 * 1024
"""Of one tile of keys, or of values, of a decode."""
_MOST_KEYS: Final = 128
_MOST_STAGES: Final = 4
_RESERVED_BYTES: Final = 4 * 1024
"""Shared memory that reductions and scales take beside the tiles."""


class Tile(NamedTuple):
    """What one program holds at a time."""

    queries: int
    """Tokens of one row."""
    lines: int
    """Tokens times the query heads that share a KV head, rounded up to what is multiplied at once."""
    keys: int
    num_warps: int
    num_stages: int
    """Tiles of keys and values whose loads are under way at once, and the one that is computed."""


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def decode_tile(shared: int, width: int, kv_bytes: int, q_bytes: int, shared_memory: int) -> Tile:
    """Cut a row of few tokens.

    `shared` query heads share a KV head of `width` elements of `kv_bytes`; `shared_memory` is what a program can have.
    """
    queries = max(1, min(MOST_DRAFTED, _DECODE_LINES // shared))
    lines = max(_LINES, power_of_2(queries * shared))
    padded = max(_LINES, power_of_2(width))
    # Numbers of 8 bits become numbers of the queries' type before they are multiplied.
    keys = min(max(_TILE_BYTES // (padded * max(kv_bytes, q_bytes)), _LINES), _MOST_KEYS)
    stages = _stages(2 * keys * padded * kv_bytes, lines * padded * q_bytes, shared_memory)
    return Tile(queries, lines, keys, 8 if q_bytes == 4 else 4, stages)


def prefill_tile(shared: int, width: int, kv_bytes: int, q_bytes: int, shared_memory: int, max_query: int) -> Tile:
    """Cut a row of many tokens, of which the longest has `max_query`."""
    padded = max(_LINES, power_of_2(width))
    if q_bytes == 4:
        lines, keys, warps = 32, 32 if padded <= 128 else 16, 8
    elif padded <= 128:
        lines, keys, warps = _PREFILL_LINES, 64, 8
    else:
        lines, keys, warps = _PREFILL_LINES, 32, 8
    if q_bytes < 4 and max_query * shared <= _PREFILL_LINES // 2:
        lines, warps = _PREFILL_LINES // 2, 4
    lines = max(lines, power_of_2(shared))
    stages = _stages(2 * keys * padded * kv_bytes, lines * padded * q_bytes, shared_memory)
    return Tile(lines // shared, lines, keys, warps, stages)


def _stages(pair_bytes: int, query_bytes: int, shared_memory: int) -> int:
    room = shared_memory - _RESERVED_BYTES - query_bytes
    return max(1, min(_MOST_STAGES, room // pair_bytes))


def chunk_of(key: int) -> int:
    """Return which chunk a position lies in."""
    if key < LARGE_FROM:
        return key // CHUNK
    return LARGE_FROM // CHUNK + (key - LARGE_FROM) // LARGE_CHUNK


def most_chunks(max_context: int, window: int | None, queries: int) -> int:
    """Return how many chunks some tokens of one row see at most."""
    chunks = chunk_of(max_context - 1) + 1
    return chunks if window is None else min(chunks, (window + queries - 2) // CHUNK + 2)


def splits_of(units: int, chunks: int, multiprocessors: int) -> int:
    """Return among how many programs the chunks of a row are divided, where there are `units` of rows and heads.

    Two programs for each multiprocessor keep enough loads under way.
    """
    return max(1, min(chunks, 2 * multiprocessors // units))
