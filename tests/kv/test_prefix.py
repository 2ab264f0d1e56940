"""Prefix keys differ whenever anything that determines the KV differs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.kv.prefix import PrefixHasher

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def chain(
    tokens: list[int], *, size: int = 4, identity: str = "m", salt: str = "", secret: bytes = b"s"
) -> list[bytes]:
    hasher = PrefixHasher(block_size=size, identity=identity, secret=secret)
    keys: list[bytes] = []
    hasher.extend(keys, hasher.root(salt), np.array(tokens, np.int32), len(tokens))
    return keys


@given(TOKENS, TOKENS)
def test_chains_agree_on_common_full_blocks_only(first: list[int], second: list[int]) -> None:
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    equal = [a == b for a, b in zip(chain(first), chain(second), strict=False)]
    assert equal == [True] * (common // 4) + [False] * (len(equal) - common // 4)


@given(TOKENS)
def test_incremental_chain_equals_full_chain(tokens: list[int]) -> None:
    hasher = PrefixHasher(block_size=4, identity="m", secret=b"s")
    keys: list[bytes] = []
    for upto in range(len(tokens) + 1):
        hasher.extend(keys, hasher.root(""), np.array(tokens, np.int32), upto)
    assert keys == chain(tokens)


@pytest.mark.law("5.3")
def test_weights_that_replace_others_share_no_key() -> None:
    hasher = PrefixHasher(block_size=4, identity="m", secret=b"s")
    roots = [
        each.root(salt, adapter)
        for each in (hasher, hasher.distinguished(b"1"), hasher.distinguished(b"2"))
        for salt in ("", "tenant")
        for adapter in ("", "adapter")
    ]
    assert len(set(roots)) == len(roots)


@pytest.mark.law("5.3")
def test_identity_salt_secret_and_block_size_separate_chains() -> None:
    tokens = list(range(8))
    chains = [
        chain(tokens),
        chain(tokens, identity="n"),
        chain(tokens, salt="tenant"),
        chain(tokens, secret=b"t"),
        chain(tokens, size=8),
    ]
    firsts = [keys[0] for keys in chains]
    assert len(set(firsts)) == len(firsts)


@pytest.mark.parametrize("other", ["tenant-2", "tenant-", "tenant-12", "tenant-1 ", "Tenant-1", "tenant-1\0", "t", ""])
@pytest.mark.law("5.3")
def test_salts_with_common_prefix_share_no_key(other: str) -> None:
    tokens = list(range(16))
    assert not set(chain(tokens, salt="tenant-1")) & set(chain(tokens, salt=other))


@given(st.text(max_size=20), st.text(max_size=20))
def test_chains_of_different_salts_are_different(first: str, second: str) -> None:
    assert (chain([1, 2, 3, 4], salt=first) == chain([1, 2, 3, 4], salt=second)) == (first == second)
