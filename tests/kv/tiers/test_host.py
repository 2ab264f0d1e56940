"""Host tier: LRU within its byte limit, evicting the tail of a prefix first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fd_core.kv.tiers.host import HostTier


def array(size: int) -> np.ndarray:
    return np.zeros(size, np.uint8)


def test_least_recently_used_is_evicted_first() -> None:
    host = HostTier(20)
    for key in (b"a", b"b"):
        host.put(key, array(10))
    host.touch([b"a"])
    host.put(b"c", array(10))
    assert b"a" in host and b"b" not in host and b"c" in host


def test_tail_of_touched_prefix_is_evicted_first() -> None:
    host = HostTier(30)
    keys = [b"a", b"b", b"c"]
    for key in keys:
        host.put(key, array(10))
    host.touch([*keys, b"not held"])
    host.put(b"x", array(10))
    assert [key in host for key in keys] == [True, True, False]


def test_value_larger_than_tier_is_not_kept() -> None:
    host = HostTier(20)
    host.put(b"a", array(20))
    assert not host.put(b"b", array(21))
    assert b"a" in host and not HostTier(0).put(b"a", array(1))


def test_stored_mark_is_dropped_with_the_block() -> None:
    host = HostTier(10)
    host.mark_written(b"a")
    assert not host.is_written(b"a")
    host.put(b"a", array(10))
    host.mark_written(b"a")
    assert host.is_written(b"a")
    host.put(b"b", array(10))
    assert not host.is_written(b"a")
    host.mark_written(b"b")
    host.unmark_written([b"a", b"b"])
    assert not host.is_written(b"b") and b"b" in host


@given(st.integers(0, 50), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.booleans()), max_size=40))
def test_byte_count_is_exact_and_within_limit(limit, steps) -> None:
    host = HostTier(limit)
    sizes: dict[bytes, int] = {}
    for number, size, touch in steps:
        key = bytes([number])
        if touch:
            host.touch([key])
            continue
        held = key in host
        if host.put(key, array(size)):
            sizes[key] = sizes[key] if held else size
            assert host.get(key) is not None
        assert host.bytes == sum(sizes[bytes([n])] for n in range(10) if bytes([n]) in host) <= limit
    host.clear()
    assert (host.bytes, len(host)) == (0, 0)
