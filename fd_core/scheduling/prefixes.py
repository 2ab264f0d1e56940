"""Known prefixes, as the scheduler uses them: which blocks hold one, and which are about to.

Pure. A prompt that begins like one whose prefill is under way waits for it rather than computing the same again, so the
keys of blocks that running prefills will complete are counted here until they are registered or given up.
"""

from __future__ import annotations

from collections.abc import Iterable

from fd_core.kv.blocks import BlockPool
from fd_core.kv.events import Recorder
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.requests import Request
from fd_core.types import IntArray

__all__ = ["Prefixes"]


class Prefixes:
    """Names the blocks of one scheduler's requests; knows nothing if there is no hasher."""

    def __init__(self, hasher: PrefixHasher | None, pool: BlockPool, recorder: Recorder | None = None) -> None:
        """`recorder` is told which prefixes become known."""
        self.hasher = hasher
        self._pool = pool
        self._recorder = recorder
        self._computing: dict[bytes, int] = {}
        """Block keys that running prefills are about to compute, with how many of them."""

    @property
    def num_computing(self) -> int:
        """Keys that are being computed; none at idle."""
        return len(self._computing)

    def root(self, salt: str) -> bytes:
        """Return where the chain of a request begins."""
        return b"" if self.hasher is None else self.hasher.root(salt)

    def keys(self, request: Request, tokens: IntArray) -> list[bytes]:
        """Return the keys of the leading full blocks; the last token is always computed, it yields the next one."""
        if self.hasher is None:
            return []
        upto = len(tokens) - 1
        self.hasher.extend(request.chain, request.root, tokens, upto)
        return request.chain[: upto // self.hasher.block_size]

    def is_computing(self, key: bytes) -> bool:
        """Whether a running prefill is about to complete the block of this key."""
        return key in self._computing

    def begin(self, keys: Iterable[bytes]) -> None:
        """A request is going to compute or load the blocks of `keys`."""
        for key in keys:
            self._computing[key] = self._computing.get(key, 0) + 1

    def complete(self, request: Request, tokens: IntArray, table: IntArray, first: int, upto: int) -> None:
        """Entries `first` to `upto` of a request's block `table` hold settled KV of its `tokens`: name them."""
        if self.hasher is None:
            return
        size = self.hasher.block_size
        self.hasher.extend(request.chain, request.root, tokens, upto * size)
        named = False
        for index in range(first, upto):
            named |= self._pool.register(int(table[index]), request.chain[index])
            self._no_longer(request.chain[index])
        if named and self._recorder is not None and not request.spec.cache_salt:
            self._recorder.stored(request.chain, tokens, size, first, upto, self._pool.knows)

    def give_up(self, keys: Iterable[bytes]) -> None:
        """A request leaves without having completed the blocks of `keys`."""
        for key in keys:
            self._no_longer(key)

    def _no_longer(self, key: bytes) -> None:
        count = self._computing.get(key, 0)
        if count > 1:
            self._computing[key] = count - 1
        else:
            self._computing.pop(key, None)
