"""Names of prefixes: a keyed hash chained over blocks of token ids.

Two chains are equal only if everything that decides the KV of a block is equal: format, weights, dtype, block size,
adapter, tenant salt and all tokens up to the block's end.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence

import numpy as np

from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.types import IntArray

FORMAT_VERSION = 1
_DIGEST_BYTES = 16
_TOKEN = np.dtype("<i4")


class PrefixHasher:
    """Computes block keys for one model and KV layout.

    `secret` keys the hash (BLAKE2b, RFC 7693), so that clients cannot construct colliding prompts.
    """

    def __init__(self, *, block_size: int, identity: str, secret: bytes = b"") -> None:
        self.block_size = block_size
        self._keyed = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=secret[:64])
        """The hash before its first byte; a copy costs half of what a new one does."""
        self._identity = f"fd_core/{FORMAT_VERSION}/{block_size}/{identity}".encode()
        self.plain_root = self.root("")
        """Parent of the first block of a chain without salt and adapter."""

    def distinguished(self, nonce: bytes) -> PrefixHasher:
        """Return a hasher whose keys differ from all others, for KV of weights that the identity does not name."""
        hasher = copy.copy(self)
        hasher._identity += b"/" + nonce
        hasher.plain_root = hasher.root("")
        return hasher

    def root(self, salt: str, adapter: str = "") -> bytes:
        """Return the parent of a chain's first block; different salts, or adapters by digest, never share a block."""
        model = self._identity + (f"/{adapter}".encode() if adapter else b"")
        state = self._keyed.copy()
        state.update(len(model).to_bytes(4, "little") + model + salt.encode())
        return state.digest()

    def extend(self, chain: list[bytes], root: bytes, tokens: IntArray, upto: int) -> None:
        """Append keys to `chain` until it covers every full block among the first `upto` of `tokens`."""
        done, size = len(chain), self.block_size
        # One copy of the tokens instead of an array per block: a router hashes every prompt on its event loop.
        if upto < (done + 1) * size:
            return
        data = np.ascontiguousarray(tokens[done * size : upto // size * size], _TOKEN).tobytes()
        parent, begun = chain[-1] if chain else root, self._keyed.copy
        for begin in range(0, len(data), 4 * size):
            state = begun()
            state.update(parent + data[begin : begin + 4 * size])
            parent = state.digest()
            chain.append(parent)


def block_key(key: bytes, group: int) -> bytes:
    """Return the key of a group's KV for the tokens that `key` names."""
    return key + bytes((group,)) if group else key


def block_keys(chain: Sequence[bytes], groups: LayerGroups, whole: range, sliding: range) -> tuple[bytes, ...]:
    """Return the keys of blocks of a chain, see `LayerGroups.order`."""
    if groups == ONE_GROUP:
        return tuple(chain[whole.start : whole.stop])
    return tuple(block_key(chain[entry], group) for entry, group in groups.order(whole, sliding))


def ordered_blocks(tables: IntArray, groups: LayerGroups, whole: range, sliding: range) -> IntArray:
    """Return a copy of entries of `tables` int32[groups, n], see `LayerGroups.order`."""
    kept = tables[: groups.whole, whole.start : whole.stop].T
    others = tables[groups.whole :, sliding.start : sliding.stop].T
    return np.concatenate([kept.ravel(), others.ravel()])
