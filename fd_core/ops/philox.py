"""Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2,
3", SC 2011).

A number is a function of a key and a counter, so a request draws the same one for the same position in any batch. The
key is the request's seed, the counter the token's position. The generator is written once for all frameworks: 32-bit
words are stored in signed 64-bit integers, whose products wrap to the right bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_MANTISSA_BITS = 24
"""A float32 represents every multiple of 2^-24 below 1, so the numbers are evenly spaced."""


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Encrypt counters with keys; every argument is an int64 array of any framework, of values below 2^32.

    All arrays share one shape; returns four arrays of that shape with values below 2^32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    word, half = _word(c0), c0 * 0 + 32  # Paddle creates a tensor from a scalar each time, and leaks a part of it
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> half) & word) ^ c1 ^ k0,
            product1 & word,
            ((product0 >> half) & word) ^ c3 ^ k1,
            product0 & word,
        )
        k0 = (k0 + _WEYL[0]) & word
        k1 = (k1 + _WEYL[1]) & word
    return c0, c1, c2, c3


def random_bits(seeds: Any, positions: Any) -> Any:
    """Return int64[R], 24 random bits for each row; `seeds` is int64[R] (bits), `positions` int64[R], not negative."""
    zero = positions * 0
    word = _word(positions)
    words = philox4x32((positions, zero, zero, zero), (seeds & word, (seeds >> (zero + 32)) & word))
    return words[0] >> (zero + (32 - _MANTISSA_BITS))


def _word(like: Any) -> Any:
    """Return 2^32 - 1 in the shape of an array; Paddle has no bitwise operation of an array and a scalar."""
    return like * 0 + _WORD


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Return float32[R] in [0, 1), multiples of 2^-24: one number for each (seed uint64[R], position int32[R])."""
    bits = random_bits(seeds.astype(np.uint64, copy=False).view(np.int64), positions.astype(np.int64))
    scaled: npt.NDArray[np.float32] = bits.astype(np.float32) * np.float32(2.0**-_MANTISSA_BITS)
    return scaled
