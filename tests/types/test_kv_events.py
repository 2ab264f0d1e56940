"""Whoever follows the events knows what the pool knows, whatever happens in whatever order."""

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
    """A request with these tokens, its keys computed."""
    spec = RequestSpec(request_id="r", prompt=tuple(tokens), params=SamplingParams(max_tokens=1), cache_salt=salt)
    request = Request(spec, 0, 1000, HASHER.root(salt))
    HASHER.extend(request.chain, request.root, request.tokens.view(), len(tokens))
    return request


class FollowMachine(RuleBasedStateMachine):
    """Requests take, name and give up blocks of one small pool; a reader follows its events."""

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
        self.prefixes.complete(request, table, done, upto)
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
        told = set(self.held)
        assert told == held if self.complete else told <= held
        assert self.reader.paths == {self.paths[key] for key in told}
        assert len(self.held) == len(told)

    @rule()
    def come_late(self) -> None:
        self.collect()
        late, copy = Reader(), StoredBlocks(SIZE)
        for event in self.held.events():
            late.apply(event)
            copy.apply(event)
        assert late.paths == self.reader.paths and set(copy) == set(self.held)
        self.reader, self.held = late, copy

    @invariant()
    def nothing_salted_is_told_and_little_waits(self) -> None:
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


def test_nothing_is_told_of_a_prompt_with_a_salt() -> None:
    recorder = Recorder()
    pool = BlockPool(2, recorder)
    table = pool.allocate(2)
    assert table is not None
    Prefixes(HASHER, pool, recorder, lambda _: None).complete(known([1] * (2 * SIZE), "tenant"), table, 0, 2)
    assert recorder.take() == ()


def test_what_is_evicted_and_stored_again_is_told_in_that_order() -> None:
    recorder = Recorder()
    pool = BlockPool(1, recorder)
    prefixes = Prefixes(HASHER, pool, recorder, lambda _: None)
    for tokens in ([1, 1], [2, 2], [1, 1]):
        table = pool.allocate(1)
        assert table is not None
        prefixes.complete(known(tokens), table, 0, 1)
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


def test_a_block_whose_parent_left_is_told_with_its_path() -> None:
    recorder = Recorder()
    chain, tokens = chain_of([1, 2, 3, 4]), np.array([1, 2, 3, 4], np.int32)
    recorder.stored(chain, tokens, SIZE, 0, 1, lambda _: True)
    recorder.removed(chain[:1])
    recorder.take()
    recorder.stored(chain, tokens, SIZE, 1, 2, lambda key: key == chain[1])
    assert recorder.take() == (Stored(BEGINNING, tuple(chain), ids([1, 2, 3, 4])), Removed((chain[0],)))


def test_who_does_not_collect_begins_again() -> None:
    recorder = Recorder(limit=2)
    chain, tokens = chain_of([1, 2, 3, 4, 5, 6]), np.arange(1, 7, dtype=np.int32)
    recorder.stored(chain, tokens, SIZE, 0, 3, lambda _: True)
    assert recorder.take() == (Cleared(),)
    recorder.removed(chain[2:])
    assert recorder.take() == (), "what was never told is not taken back"
    recorder.stored(chain, tokens, SIZE, 1, 2, lambda _: True)
    assert recorder.take() == (Stored(BEGINNING, tuple(chain[:2]), ids([1, 2, 3, 4])),)


def test_an_orphan_breaks_the_law() -> None:
    with pytest.raises(ValueError, match="parent of stored blocks is not stored"):
        StoredBlocks(SIZE).apply(Stored(b"nobody", (b"a",), ids([1, 2])))


def test_events_pass_a_process_boundary() -> None:
    events: tuple[KVEvent, ...] = (Stored(BEGINNING, (b"a",), ids([1, 2])), Removed((b"a",)), Cleared())
    data = msgspec.msgpack.encode(events)
    assert msgspec.msgpack.decode(data, type=tuple[KVEvent, ...]) == events
