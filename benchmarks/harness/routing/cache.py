"""Prefix cache of a worker, as in an engine: blocks of text with LRU eviction. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

CHARS_PER_TOKEN = 4
"""Assumed length of a token."""
BLOCK_TOKENS = 16
_BLOCK_CHARS = BLOCK_TOKENS * CHARS_PER_TOKEN


def tokens_of(text: str) -> int:
    """Return the tokens of a prompt."""
    return -(-len(text) // CHARS_PER_TOKEN)


def blocks_of(text: str) -> list[int]:
    """Return a name for each full block; equal where everything up to the block's end is."""
    names, parent = [], 0
    for start in range(0, len(text) - _BLOCK_CHARS + 1, _BLOCK_CHARS):
        parent = hash((parent, text[start : start + _BLOCK_CHARS]))
        names.append(parent)
    return names


@dataclass(slots=True)
class Seen:
    """Totals of the lookups in a cache so far."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evicted_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """Effect of one prompt on a cache."""

    computed: int
    """Tokens that were not there."""
    evicted: list[Hashable]
    """Names of blocks that were evicted for it, perhaps some of the prompt itself."""


class PrefixCache:
    """At most `capacity` blocks. A block is evicted before its predecessors, as a block table requires."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()
        self.seen = Seen()

    def __len__(self) -> int:
        return len(self._blocks)

    def compute(self, text: str) -> int:
        """Take in a prompt; return how many of its tokens were not there. The last token is always computed."""
        return self.take(blocks_of(text), tokens_of(text)).computed

    def take(self, names: Sequence[Hashable], total: int) -> Taken:
        """Take in a prompt of `total` tokens by the names of its full blocks."""
        hits = 0
        for name in names:
            if name not in self._blocks:
                break
            hits += 1
        cached = min(hits * BLOCK_TOKENS, total - 1)
        self.seen.requests += 1
        self.seen.prompt_tokens += total
        self.seen.cached_tokens += cached
        for name in reversed(names[: self._capacity]):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        evicted = []
        while len(self._blocks) > self._capacity:
            evicted.append(self._blocks.popitem(last=False)[0])
        self.seen.evicted_blocks += len(evicted)
        return Taken(total - cached, evicted)

    def clear(self) -> None:
        """Forget everything, the counts too."""
        self._blocks.clear()
        self.seen = Seen()
