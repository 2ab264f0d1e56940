"""A reader of the KV events mirrors the pool's contents after any sequence of operations."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fd_core.kv.blocks import BlockPool
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.prefixes import Prefixes
from fd_core.scheduling.requests import Request
from fd_core.types import RequestSpec, SamplingParams
from fd_core.types.kv_events import BEGINNING, Cleared, KVEvent, Recorder, Removed, Stored, StoredBlocks
from tests.kv.following import SIZE, Reader, ids

BLOCKS = 8
HASHER = PrefixHasher(block_size=SIZE, identity="test")
PROMPTS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=BLOCKS * SIZE)


def known(tokens: list[int], salt: str = "") -> Request:
    """Return a request with these tokens and its keys computed."""
    spec = RequestSpec(request_id="r", prompt=tuple(tokens), params=SamplingParams(max_tokens=1), cache_salt=salt)
    request = Request(spec, 0, 1000, HASHER.root(salt))
    HASHER.extend(request.chain, request.root, request.tokens.view(), len(tokens))
    return request


class FollowMachine(RuleBasedStateMachine):
    """Requests allocate, publish and release blocks of one small pool; a reader follows its events."""

    @initialize(limit=st.sampled_from([1000, 1000, 1000, 6]))
    def start(self, limit: int) -> None:
        self.recorder = Recorder(limit)
        self.complete = limit == 1000
        self.pool = BlockPool(BLOCKS, self.recorder)
        self.prefixes = Prefixes(HASHER, self.pool, self.recorder, lambda _: None)
        self.running: list[tuple[Request, np.ndarray, int]] = []
        self.held = StoredBlocks(SIZE)
        self.reader = Reader()
        self.secret: set[bytes] = set()
        self.paths: dict[bytes, tuple[int, ...]] = {}

    @rule(tokens=PROMPTS, salted=st.integers(0, 4))
    def begin(self, tokens: list[int], salted: int) -> None:
        salt = "" if salted else "tenant"
        request = known(tokens, salt)
        matched = self.pool.match(request.chain)
        self.pool.acquire(matched)
        more = self.pool.allocate(len(request.chain) - len(matched))
        if more is None:
            self.pool.release(matched, -1)
            return
        if salt:
            self.secret.update(request.chain)
        else:
            self.paths.update((key, tuple(tokens[: (i + 1) * SIZE])) for i, key in enumerate(request.chain))
        self.running.append((request, np.concatenate([matched, more]), len(matched)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        request, table, done = self.running[index]
        upto = data.draw(st.integers(done, len(table)))
        self.prefixes.complete(request, table[None], done, upto)
        self.running[index] = (request, table, upto)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, table, _ = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.release(table, -1)

    @rule()
    def forget(self) -> None:
        self.pool.forget_prefixes()

    @rule()
    def collect(self) -> None:
        for event in self.recorder.take():
            self.held.apply(event)
            self.reader.apply(event)
        held = {key for key in self.paths if self.pool.knows(key)}
        published = set(self.held)
        assert published == held if self.complete else published <= held
        assert self.reader.paths == {self.paths[key] for key in published}
        assert len(self.held) == len(published)

    @rule()
    def copy_to_late_reader(self) -> None:
        self.collect()
        late, copy = Reader(), StoredBlocks(SIZE)
        for event in self.held.events():
            late.apply(event)
            copy.apply(event)
        assert late.paths == self.reader.paths and set(copy) == set(self.held)
        self.reader, self.held = late, copy

    @invariant()
    def salted_keys_are_never_published_and_buffer_is_bounded(self) -> None:
        if not hasattr(self, "recorder"):
            return
        events = self.recorder._events
        assert not self.secret & {key for event in events if not isinstance(event, Cleared) for key in event.keys}
        assert self.recorder._size <= self.recorder._limit


TestFollow = FollowMachine.TestCase
TestFollow.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def chain_of(tokens: list[int]) -> list[bytes]:
    chain: list[bytes] = []
    HASHER.extend(chain, HASHER.root(""), np.array(tokens, np.int32), len(tokens))
    return chain


def test_salted_prompt_publishes_no_events() -> None:
    recorder = Recorder()
    pool = BlockPool(2, recorder)
    table = pool.allocate(2)
    assert table is not None
    Prefixes(HASHER, pool, recorder, lambda _: None).complete(known([1] * (2 * SIZE), "tenant"), table[None], 0, 2)
    assert recorder.take() == ()


def test_eviction_and_re_store_keep_their_order() -> None:
    recorder = Recorder()
    pool = BlockPool(1, recorder)
    prefixes = Prefixes(HASHER, pool, recorder, lambda _: None)
    for tokens in ([1, 1], [2, 2], [1, 1]):
        table = pool.allocate(1)
        assert table is not None
        prefixes.complete(known(tokens), table[None], 0, 1)
        pool.release(table, -1)
    one, two = chain_of([1, 1]), chain_of([2, 2])
    assert recorder.take() == (
        Stored(BEGINNING, tuple(one), ids([1, 1])),
        Removed(tuple(one)),
        Stored(BEGINNING, tuple(two), ids([2, 2])),
        Removed(tuple(two)),
        Stored(BEGINNING, tuple(one), ids([1, 1])),
    )
    assert recorder.take() == ()


def test_orphaned_block_is_published_with_its_full_path() -> None:
    recorder = Recorder()
    chain, tokens = chain_of([1, 2, 3, 4]), np.array([1, 2, 3, 4], np.int32)
    recorder.stored(chain, tokens, SIZE, 0, 1, lambda _: True)
    recorder.removed(chain[:1])
    recorder.take()
    recorder.stored(chain, tokens, SIZE, 1, 2, lambda key: key == chain[1])
    assert recorder.take() == (Stored(BEGINNING, tuple(chain), ids([1, 2, 3, 4])), Removed((chain[0],)))


def test_overflow_publishes_cleared_and_restarts() -> None:
    recorder = Recorder(limit=2)
    chain, tokens = chain_of([1, 2, 3, 4, 5, 6]), np.arange(1, 7, dtype=np.int32)
    recorder.stored(chain, tokens, SIZE, 0, 3, lambda _: True)
    assert recorder.take() == (Cleared(),)
    recorder.removed(chain[2:])
    assert recorder.take() == (), "a block that was never published is not removed"
    recorder.stored(chain, tokens, SIZE, 1, 2, lambda _: True)
    assert recorder.take() == (Stored(BEGINNING, tuple(chain[:2]), ids([1, 2, 3, 4])),)


def test_stored_event_with_unknown_parent_raises() -> None:
    with pytest.raises(ValueError, match="parent of stored blocks is not stored"):
        StoredBlocks(SIZE).apply(Stored(b"unknown", (b"a",), ids([1, 2])))


def test_events_round_trip_through_msgpack() -> None:
    events: tuple[KVEvent, ...] = (Stored(BEGINNING, (b"a",), ids([1, 2])), Removed((b"a",)), Cleared())
    data = msgspec.msgpack.encode(events)
    assert msgspec.msgpack.decode(data, type=tuple[KVEvent, ...]) == events
