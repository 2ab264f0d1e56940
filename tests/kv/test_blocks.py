"""Blocks are partitioned into free, owned and fenced under any sequence of operations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fd_core.kv.blocks import BlockPool

BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Compares a pool with a plain model: owners, last step touching each block, and readers."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.owners: list[np.ndarray] = []
        self.keys: dict[int, list[bytes]] = {}
        self.readers: list[np.ndarray] = []
        self.step = 0
        self.answered = -1
        self.touched: dict[int, int] = {}
        self.names = 0

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > free)
        if blocks is not None:
            owned = {block for owner in self.owners for block in owner.tolist()}
            assert not owned & set(blocks.tolist()), "an owned block was allocated"
            for block in blocks.tolist():
                assert self.touched.get(block, -1) <= self.answered, "a fenced block was allocated"
            read = {block for reader in self.readers for block in reader.tolist()}
            assert not read & set(blocks.tolist()), "a block being read was allocated"
            self.owners.append(blocks)

    @rule()
    def schedule_step_touching_all_owned_blocks(self) -> None:
        self.step += 1
        for owner in self.owners:
            for block in owner.tolist():
                self.touched[block] = self.step

    @precondition(lambda self: self.answered < self.step)
    @rule()
    def complete_one_step(self) -> None:
        self.answered += 1
        self.pool.answered(self.answered)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        fence = max((self.touched.get(block, -1) for block in owner.tolist()), default=-1)
        self.pool.release(owner, fence)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def register_a_prefix(self, data: st.DataObject) -> None:
        owner = self.owners[data.draw(st.integers(0, len(self.owners) - 1))]
        keys = [b"%d-%d" % (self.names, index) for index in range(len(owner))]
        self.keys[self.names] = keys
        self.names += 1
        self.pool.register(owner.tolist(), keys)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def start_reading(self, data: st.DataObject) -> None:
        owner = self.owners[data.draw(st.integers(0, len(self.owners) - 1))]
        self.pool.pin(owner)
        self.readers.append(owner)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        self.pool.unpin(self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1))))

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def match_and_acquire(self, data: st.DataObject) -> None:
        free = self.pool.num_free
        matched = self.pool.match(self.keys[data.draw(st.integers(0, self.names - 1))])
        assert self.pool.num_free == free, "matching allocated or evicted a block"
        owned = {block for owner in self.owners for block in owner.tolist()}
        for block in set(matched.tolist()) - owned:
            assert self.touched.get(block, -1) <= self.answered, "a fenced block matched"
        self.pool.acquire(matched)
        self.owners.append(matched)

    @invariant()
    def partition_is_exact(self) -> None:
        self.pool.check_integrity(self.owners)
        assert self.pool.num_free + self.pool.num_fenced + self.pool.num_owned == BLOCKS


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.law("3.1")
def test_release_of_free_block_is_an_error() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks, -1)
    with pytest.raises(RuntimeError, match="without owner"):
        pool.release(blocks, -1)


@pytest.mark.law("3.2")
def test_shared_block_stays_fenced_for_latest_owner() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.register([0], [b"key"])
    pool.acquire(pool.match([b"key"]))
    pool.release(blocks, fence=7)
    pool.release(blocks, fence=3)
    pool.answered(3)
    assert (pool.num_free, pool.num_fenced) == (0, 1)
    pool.answered(7)
    assert (pool.num_free, pool.num_fenced) == (1, 0)


def test_block_only_read_is_reused_only_as_prefix() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.register(blocks[:1].tolist(), [b"complete"])
    pool.pin(blocks)
    pool.release(blocks, -1)
    assert (pool.num_free, pool.num_fenced) == (0, 2)
    matched = pool.match([b"complete"])
    assert matched.tolist() == blocks[:1].tolist()
    pool.acquire(matched)
    assert (pool.num_owned, pool.num_fenced) == (1, 1)
    pool.release(matched, -1)
    assert (pool.num_free, pool.num_fenced) == (0, 2), "it is still being read"
    pool.acquire(pool.match([b"complete"]))
    pool.unpin(blocks)
    assert (pool.num_owned, pool.num_free) == (1, 1), "the new owner keeps it"
    pool.release(matched, -1)
    assert (pool.num_free, pool.num_cached) == (2, 1)


def test_tail_of_prefix_is_evicted_before_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    keys = [b"a", b"b", b"c"]
    pool.register(blocks.tolist(), keys)
    pool.release(blocks, -1)
    assert pool.allocate(1) is not None
    assert len(pool.match(keys)) == 2


def test_first_block_registered_for_a_prefix_is_kept() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None
    assert second is not None
    for blocks in (first, second):
        pool.register(blocks.tolist(), [b"key"])
    assert pool.match([b"key"]).tolist() == first.tolist()
    pool.release(second, -1)
    pool.release(first, -1)
    assert pool.num_cached == 1, "a prefix maps to one block only"
    assert pool.allocate(2) is not None
    assert not len(pool.match([b"key"]))
