"""Who tells what it holds gets credit for exactly that; who does not, for what it served."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fd_core.kv.prefix import PrefixHasher
from fd_core.router.router import Router
from fd_core.router.workers import RouterWorker
from fd_core.types.kv_events import BEGINNING, Cleared, KVEvent, Recorder, Removed, Stored, StoredBlocks
from tests.router.helpers import add, chosen, place, request, router_of, serve

SETTINGS: dict[str, Any] = {"policy": "cache_aware", "cache_block_size": 4}


def ids(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def stored(tokens: Sequence[int], size: int, parent: bytes = BEGINNING, name: str = "") -> Stored:
    keys = tuple(f"{name}{tokens[: end + size]}".encode() for end in range(0, len(tokens), size))
    return Stored(parent, keys, ids(tokens))


def telling(
    router: Router, worker: RouterWorker, size: int, *events: KVEvent, engines: int = 1
) -> Callable[[KVEvent], bool]:
    """Let a worker begin to report; return what takes its next events."""
    assert router.reported_kv.begin(worker, size, "p", engines)
    for event in events:
        assert router.reported_kv.apply(worker, event)
    return functools.partial(router.reported_kv.apply, worker)


def hits(router: Router, tokens: Sequence[int], **more: Any) -> int:
    with chosen(router.select(request(tokens, **more), 0.0, 0.0)) as selection:
        return selection.hits


def shown(router: Router, worker: RouterWorker) -> Any:
    return next(each for each in router.snapshot().workers if each.worker == worker)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16])
def test_blocks_of_any_size_are_understood(size: int) -> None:
    router = router_of(mixed=1, **SETTINGS)
    (worker,) = router.workers()
    prompt = list(range(48))
    tell = telling(router, worker, size, stored(prompt[: 48 // size * size], size))
    assert hits(router, prompt) == 48 // size * size // 4
    assert hits(router, [*prompt[:17], 99, 99, 99]) == 17 // size * size // 4
    last = stored(prompt[: 48 // size * size], size).keys[20 // size]
    assert tell(Removed((last,)))
    assert hits(router, prompt) == 20 // size * size // 4, "what is gone, and all behind it, counts no longer"


def test_what_was_served_counts_for_nothing_while_the_worker_tells() -> None:
    router = router_of(mixed=1, **SETTINGS)
    (worker,) = router.workers()
    prompt = list(range(16))
    serve(router, prompt)
    assert hits(router, prompt) == 4
    tell = telling(router, worker, 4)
    assert hits(router, prompt) == 0 and shown(router, worker).held_blocks == 0
    serve(router, prompt)
    assert hits(router, prompt) == 0, "it was served, but is not held"
    event = stored(prompt, 4)
    tell(event)
    assert hits(router, prompt) == 4 and shown(router, worker).held_blocks == 4
    tell(Removed(event.keys))
    assert hits(router, prompt) == 0
    tell(stored(prompt, 4))
    tell(Cleared())
    assert hits(router, prompt) == 0 and shown(router, worker).kv_events == 4
    router.reported_kv.end(worker)
    assert hits(router, prompt) == 4 and shown(router, worker).held_blocks is None
    assert tell(stored(prompt, 4)) is False, "nobody follows any longer"
    assert shown(router, worker).held_blocks is None


def test_a_worker_holds_as_much_of_a_prompt_as_one_of_its_engines() -> None:
    """Engines name a prefix by the same key, or by different ones; nothing is put together from several engines."""
    router = router_of(mixed=2, **SETTINGS)
    worker, other = router.workers()
    prompt = list(range(16))
    whole, half = stored(prompt, 4), stored(prompt[:8], 4)
    tell = telling(router, worker, 4, half, replace(whole, engine=2), engines=3)
    telling(router, other, 4, stored(prompt[:12], 4))
    with chosen(router.select(request(prompt), 0.0, 0.0)) as selection:
        assert (selection.decode, selection.hits) == (worker, 4)
    assert shown(router, worker).held_blocks == 2 + 4
    tell(Removed(whole.keys[:1], engine=2))
    with chosen(router.select(request(prompt), 0.0, 0.0)) as selection:
        assert (selection.decode, selection.hits) == (other, 3)
    router.deregister(other.url, 0.0)
    assert hits(router, prompt) == 2, "two blocks of one engine do not go on with two of another"
    tell(Cleared(engine=2))
    assert hits(router, prompt) == 2 and shown(router, worker).held_blocks == 2
    tell(Cleared())
    assert hits(router, prompt) == 0
    router.reported_kv.end(worker)
    assert not router.reported_kv._holders and not router.reported_kv._sizes and not router.reported_kv._further


@pytest.mark.parametrize("engine", [2, -1])
def test_blocks_of_an_engine_that_a_worker_does_not_have_are_refused(engine: int) -> None:
    router = router_of(mixed=1, **SETTINGS)
    tell = telling(router, router.workers()[0], 4, engines=2)
    with pytest.raises(ValueError, match="engine that it does not have"):
        tell(Cleared(engine=engine))


@pytest.mark.parametrize("engines", [0, 1 << 20])
def test_a_number_of_engines_that_cannot_be_is_refused(engines: int) -> None:
    router = router_of(mixed=1, **SETTINGS)
    with pytest.raises(ValueError, match="engines"):
        router.reported_kv.begin(router.workers()[0], 4, "p", engines)


def test_what_is_held_does_not_expire() -> None:
    router = router_of(mixed=1, **SETTINGS)
    (worker,) = router.workers()
    telling(router, worker, 4, stored(list(range(16)), 4))
    with chosen(router.select(request(range(16)), 1e9, 0.0)) as selection:
        assert selection.hits == 4


def test_the_cache_decides_between_one_who_tells_and_one_who_does_not() -> None:
    router = router_of(mixed=2, **SETTINGS)
    first, second = router.workers()
    prompt = list(range(16))
    assert serve(router, prompt) == first
    telling(router, first, 4)
    telling(router, second, 2, stored(prompt, 2))
    assert place(router, prompt).decode == second


def test_prompts_of_adapters_are_not_compared_with_what_is_told() -> None:
    """Workers tell the blocks of the model itself only."""
    router = router_of(mixed=1, **SETTINGS)
    (worker,) = router.workers()
    prompt = list(range(16))
    router.serves(worker, ["base", "sql"], ["sql"])
    telling(router, worker, 4, stored(prompt, 4))
    assert (hits(router, prompt, model="sql"), hits(router, prompt, model="base")) == (0, 4)
    with chosen(router.select(request(prompt, model="sql"), 0.0, 0.0)) as selection:
        router.served(selection, 0.0)
    assert hits(router, prompt, model="sql") == 4, "what was served counts"


def test_salted_prompts_and_prompts_without_tokens_are_not_compared_with_what_is_told() -> None:
    router = router_of(mixed=1, **SETTINGS)
    (worker,) = router.workers()
    prompt = list(range(16))
    telling(router, worker, 4, stored(prompt, 4))
    assert (hits(router, prompt, salt="tenant"), hits(router, prompt, tokenized=False)) == (0, 0)
    for more in ({"salt": "tenant"}, {"tokenized": False}):
        with chosen(router.select(request([7] * 16, **more), 0.0, 0.0)) as selection:
            router.served(selection, 0.0)
        assert hits(router, [7] * 16, **more) == 4, "what was served counts"
    assert hits(router, [7] * 16) == 0, "another's prompt gave credit to one without a salt"


def test_events_of_a_process_count_for_its_own_incarnation() -> None:
    router = router_of(**SETTINGS)
    first = add(router, "http://w", instance="a")
    prompt = list(range(16))
    assert not router.reported_kv.begin(first, 4, "b"), "another process has this address by now"
    assert router.reported_kv.begin(first, 4, "a")
    assert router.reported_kv.apply(first, stored(prompt, 4))
    second = router.health(first, True, 1.0, instance="b")
    assert second != first
    assert router.reported_kv.apply(first, stored(list(range(16, 32)), 4)) is False
    assert (hits(router, prompt), hits(router, list(range(16, 32)))) == (0, 0)
    assert shown(router, second).held_blocks is None and shown(router, second).kv_events == 0
    assert not router.reported_kv.begin(first, 4, "a")


def test_a_worker_that_left_is_forgotten() -> None:
    router = router_of(mixed=1, **SETTINGS)
    (worker,) = router.workers()
    tell = telling(router, worker, 4, stored(list(range(16)), 4))
    router.deregister(worker.url, 0.0)
    assert not tell(Cleared()) and not router.reported_kv._mirrors and not router.reported_kv._num_events


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Stored(b"nobody", (b"k",), ids([1] * 4)), "does not hold"),
        (Stored(BEGINNING, (b"k",), ids([1] * 3)), "without all their tokens"),
        (Stored(BEGINNING, (), b""), "without all their tokens"),
        (stored(list(range(40)), 4), "more than the 8 blocks"),
    ],
)
def test_what_does_not_fit_is_refused(event: KVEvent, says: str) -> None:
    router = router_of(mixed=1, max_index_blocks=8, **SETTINGS)
    tell = telling(router, router.workers()[0], 4)
    with pytest.raises(ValueError, match=says):
        tell(event)


@pytest.mark.parametrize("size", [0, -1, 1 << 20])
def test_a_block_size_that_cannot_be_is_refused(size: int) -> None:
    router = router_of(mixed=1, **SETTINGS)
    with pytest.raises(ValueError, match="tokens"):
        router.reported_kv.begin(router.workers()[0], size, "p")


@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "store", "evict", "late"]), st.lists(st.integers(0, 1), max_size=12)),
        max_size=25,
    ),
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
)
def test_a_router_knows_what_a_worker_holds(
    calls: list[tuple[str, list[int]]], asked: list[int], size: int, router_size: int
) -> None:
    """A worker stores and evicts in any order, children before parents or after; a router may come late."""
    hasher = PrefixHasher(block_size=size, identity="worker", secret=b"its own")
    recorder, held, known = Recorder(), StoredBlocks(size), dict[bytes, int]()
    router = router_of(mixed=1, policy="cache_aware", cache_block_size=router_size)
    (worker,) = router.workers()
    tell = telling(router, worker, size)

    def chain_of(tokens: list[int]) -> list[bytes]:
        chain: list[bytes] = []
        hasher.extend(chain, hasher.root(""), np.array(tokens, np.int32), len(tokens))
        return chain

    for call, tokens in calls:
        chain = chain_of(tokens)
        if call == "store" and chain:
            known[chain[-1]] = 1
            upto = len(chain)
            recorder.stored(chain, np.array(tokens, np.int32), size, upto - 1, upto, known.__contains__)
        elif call == "evict" and chain and known.pop(chain[-1], None):
            recorder.removed(chain[-1:])
        for event in recorder.take():
            held.apply(event)
            assert tell(event)
        if call == "late":
            tell = telling(router, worker, size, *held.events())
    expected = 0
    for key in chain_of(asked):
        if key not in known:
            break
        expected += size
    assert hits(router, asked) == expected // router_size
    assert shown(router, worker).held_blocks == len(known)
