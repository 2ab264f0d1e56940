"""Known prefixes, as the scheduler uses them: the blocks that hold one, and the blocks that soon will.

Pure. A prompt that shares a prefix with a prompt in prefill waits for that prefill instead of computing the same KV
again. So the keys of the blocks that running prefills will complete are counted here until they are registered or given
up; `on_end` is called with each key that is no longer awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product, starmap

import numpy as np

from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.kv.blocks import BlockPool
from fd_core.kv.prefix import PrefixHasher, block_key
from fd_core.scheduling.images import identity
from fd_core.scheduling.requests import Request
from fd_core.types import IntArray
from fd_core.types.kv_events import Recorder


@dataclass
class Prefixes:
    """Hashes the blocks of the requests of one scheduler; finds nothing if there is no hasher."""

    hasher: PrefixHasher | None
    _pool: BlockPool
    _recorder: Recorder | None
    """Records prefixes that become known."""
    _on_end: Callable[[bytes], None]
    """Called with keys that no running request will complete."""
    computing: dict[bytes, int] = field(default_factory=dict)
    """Block keys that running prefills and loads are about to complete, with the number of requests."""
    _groups: LayerGroups = ONE_GROUP

    @property
    def num_computing(self) -> int:
        """Keys that are being computed; 0 at idle."""
        return len(self.computing)

    def root(self, salt: str, adapter: str) -> bytes:
        """Return the root of a request's key chain."""
        if self.hasher is None:
            return b""
        return self.hasher.root(salt, adapter) if salt or adapter else self.hasher.plain_root

    def change_weights(self, nonce: bytes) -> None:
        """Give the blocks of all later chains other keys."""
        if self.hasher is not None:
            self.hasher = self.hasher.distinguished(nonce)

    def extend(self, request: Request) -> None:
        """Compute the missing keys of the full blocks of a request's tokens."""
        if self.hasher is not None:
            tokens = request.tokens.view()
            if len(tokens) >= (len(request.chain) + 1) * self.hasher.block_size:
                done = len(request.chain) * self.hasher.block_size
                if request.images and request.images[-1].end > done:
                    tokens = identity(tokens, request.images)
                self.hasher.extend(request.chain, request.root, tokens, len(tokens))

    def keys(self, request: Request) -> Sequence[bytes]:
        """Return the keys of full blocks that may be known and leave a token to compute, which yields the next."""
        if self.hasher is None or ((request.prompt_logprobs or request.pooled) and request.needs_every_position):
            return ()
        return request.chain[: (request.num_tokens - 1) // self.hasher.block_size]

    def match(self, keys: Sequence[bytes], last: IntArray) -> IntArray:
        """Return int32[n]: the blocks that hold the longest known prefix; int32[groups, n] unless there is one group.

        A sliding group needs only those that the next token reads; entries before them are -1. `last` is what another
        request was admitted with in the same plan, which owns these blocks: prompts that arrive together often share a
        prefix, and a key identifies everything before its block.
        """
        if self._groups != ONE_GROUP:
            return self._match_groups(keys)
        count = len(last)
        if 0 < count <= len(keys) and self._pool.holds(int(last[-1]), keys[count - 1]):
            more = self._pool.match(keys[count:])
            return np.concatenate([last, more]) if len(more) else last
        return self._pool.match(keys)

    def _match_groups(self, keys: Sequence[bytes]) -> IntArray:
        groups, most = self._groups, len(keys)
        found = np.full((groups.count, most), -1, np.int32)
        if self.hasher is None:
            return found
        for group in range(groups.whole):
            blocks = self._pool.match(block_key(key, group) for key in keys[:most])
            most = len(blocks)
            found[group, :most] = blocks
        size, entry = self.hasher.block_size, most if groups.sliding else 0
        while entry > groups.first_read(most * size, size):
            entry -= 1
            column = [self._pool.find(block_key(keys[entry], group)) for group in range(groups.whole, groups.count)]
            found[groups.whole :, entry] = column
            if min(column) < 0:
                most = entry
        return found[:, :most]

    def awaited(self, keys: Sequence[bytes]) -> tuple[bytes, int] | None:
        """Return the key that a prompt should wait for: that of its last block that running requests will complete.

        Returns also the number of blocks up to there; None if no request computes a block of the prompt. A request that
        computes a block owns all blocks before it, so the last one is found by bisection, without checking each block.
        """
        if not self.computing:
            return None
        last, end = -1, len(keys)
        while end - last > 1:
            middle = (last + end) // 2
            if keys[middle] in self.computing or self._pool.knows(keys[middle]):
                last = middle
            else:
                end = middle
        return None if last < 0 or self._pool.knows(keys[last]) else (keys[last], last + 1)

    def announce(self, request: Request, first: int, upto: int) -> None:
        """Announce that a request will compute or load its blocks from `first` to `upto`."""
        for key in request.chain[first:upto]:
            self.computing[key] = self.computing.get(key, 0) + 1
        request.announced = upto

    def complete(self, request: Request, tables: IntArray, first: int, upto: int) -> None:
        """Register entries `first` to `upto` of a request's block `tables`, which hold settled KV of its tokens.

        `tables` is int32[groups, blocks], -1 for blocks of sliding groups that the request does not have.
        """
        if self.hasher is None:
            return
        if len(request.chain) < upto:
            self.extend(request)
        chain = request.chain
        keys = chain[first:upto]
        names = starmap(block_key, product(keys, range(len(tables))))
        named = self._pool.register(tables[:, first:upto].T.ravel().tolist(), names)
        for key in keys[: max(request.announced - first, 0)]:
            self._end(key)
            self._on_end(key)
        plain = not (request.spec.cache_salt or request.spec.adapter or request.images)
        if named and self._recorder is not None and plain:
            tokens = request.tokens.view()
            self._recorder.stored(chain, tokens, self.hasher.block_size, first=first, upto=upto, holds=self._pool.knows)

    def give_up(self, request: Request, first: int) -> None:
        """Withdraw the blocks announced from `first` on by a request that leaves its slot without completing them."""
        for key in request.chain[first : request.announced]:
            self._end(key)
            if key not in self.computing:
                self._on_end(key)
        request.announced = 0

    def _end(self, key: bytes) -> None:
        if (count := self.computing.pop(key, 0)) > 1:
            self.computing[key] = count - 1
