"""Names of prefixes: a keyed hash chained over blocks of token ids.

Two chains are equal only if everything that decides the KV of a block is equal: format, weights, dtype, block size,
tenant salt and all tokens up to the block's end.
"""

from __future__ import annotations

import hashlib

import numpy as np

from fd_core.types import IntArray

__all__ = ["FORMAT_VERSION", "PrefixHasher"]

FORMAT_VERSION = 1
_DIGEST_BYTES = 16


class PrefixHasher:
    """Computes block keys for one model and KV layout.

    `secret` keys the hash (BLAKE2b, RFC 7693), so that clients cannot construct colliding prompts.
    """

    def __init__(self, *, block_size: int, identity: str, secret: bytes = b"") -> None:
        self.block_size = block_size
        self._secret = secret[:64]
        self._identity = f"fd_core/{FORMAT_VERSION}/{block_size}/{identity}".encode()

    def root(self, salt: str) -> bytes:
        """Return the parent of a chain's first block; different salts never share a block."""
        text = len(self._identity).to_bytes(4, "little") + self._identity + salt.encode()
        return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, key=self._secret).digest()

    def extend(self, chain: list[bytes], root: bytes, tokens: IntArray, upto: int) -> None:
        """Append keys to `chain` until it covers every full block among the first `upto` of `tokens`."""
        size = self.block_size
        parent = chain[-1] if chain else root
        for index in range(len(chain), upto // size):
            block = np.ascontiguousarray(tokens[index * size : (index + 1) * size], "<i4").tobytes()
            parent = hashlib.blake2b(parent + block, digest_size=_DIGEST_BYTES, key=self._secret).digest()
            chain.append(parent)
