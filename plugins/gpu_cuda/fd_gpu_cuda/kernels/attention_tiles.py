"""How attention is cut: keys into chunks and tiles, queries into tiles, rows into splits. Pure arithmetic.

What decides bits depends on the model alone: which keys are summed up together. What fits a device, how many loads are
under way and how many programs share a row, decides none.
"""

from __future__ import annotations

from typing import Final, NamedTuple

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
_STAGES: Final = 4
_HOPPER_BYTES: Final = 200 * 1024
_RESERVED_BYTES: Final = 18 * 1024
"""Shared memory that weights, reductions and scales take beside the tiles."""


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


class HeadSizes(NamedTuple):
    """What a tile depends on."""

    shared: int
    """Query heads that share a KV head."""
    width: int
    kv_bytes: int
    """Of an element of a key."""
    q_bytes: int
    windowed: bool = False

    @property
    def padded(self) -> int:
        """Elements of a head in a tile."""
        return max(_LINES, power_of_2(self.width))

    @property
    def masked(self) -> bool:
        """Whether a tile has elements beyond the head: what loads it holds a mask in registers."""
        return self.padded != self.width

    @property
    def exact(self) -> bool:
        """Whether products are of float32, for which there are no tensor cores."""
        return self.q_bytes == 4

    @property
    def widened(self) -> bool:
        """Whether keys are of fewer bits than queries."""
        return self.kv_bytes < self.q_bytes


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def decode_tile(sizes: HeadSizes, shared_memory: int) -> Tile:
    """Cut a row of few tokens; `shared_memory` is what a program can have.

    Heads that are masked take fewer keys or lines, or more warps: what fits into registers was found by compiling.
    """
    most = _LINES if sizes.masked and sizes.exact else _DECODE_LINES
    queries = max(1, min(MOST_DRAFTED, most // sizes.shared))
    lines = max(_LINES, power_of_2(queries * sizes.shared))
    # Numbers of 8 bits become numbers of the queries' type before they are multiplied.
    keys = min(max(_TILE_BYTES // (sizes.padded * max(sizes.kv_bytes, sizes.q_bytes)), _LINES), _MOST_KEYS)
    warps = 8 if sizes.exact else 4
    if sizes.exact:
        keys = 32 if sizes.masked and not sizes.widened else _LINES
    elif sizes.masked and lines > _LINES:
        keys, warps = (min(keys, 32), 8) if sizes.widened else (keys // 2, 4)
    return Tile(queries, lines, keys, warps, _stages(sizes, lines, keys, shared_memory))


def prefill_tile(sizes: HeadSizes, shared_memory: int) -> Tile:
    """Cut a row of many tokens.

    These are the largest tiles that stay in registers: narrow heads without a window, whose keys need no widening, take
    more lines than others, and heads that are masked and widened fewer keys.
    """
    lines, keys = _PREFILL_LINES // 2, 32 if sizes.padded > 128 or (sizes.masked and sizes.widened) else 64
    if sizes.exact:
        lines, keys = 32, 16
    elif sizes.padded <= 128 and not sizes.windowed and not sizes.widened:
        lines = _PREFILL_LINES
    lines = max(lines, power_of_2(sizes.shared))
    return Tile(lines // sizes.shared, lines, keys, 8, _stages(sizes, lines, keys, shared_memory))


def _stages(sizes: HeadSizes, lines: int, keys: int, shared_memory: int) -> int:
    """Return 4 if as many fit, else 1: fewer than 4 take no less, because blocks are looked up two stages ahead.

    What is multiplied while the next tiles come needs a place of its own on Hopper, and so do the queries. Masked loads
    of float32 are not ahead of anything: what waits for its mask would not stay in registers.
    """
    if sizes.exact and sizes.masked:
        return 1
    pair, queries = 2 * keys * sizes.padded * sizes.kv_bytes, lines * sizes.padded * sizes.q_bytes
    needed = 3 * pair + queries if shared_memory >= _HOPPER_BYTES else max(2 * pair, queries)
    return _STAGES if needed + _RESERVED_BYTES <= shared_memory else 1


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
