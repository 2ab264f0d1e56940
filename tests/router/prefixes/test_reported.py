"""Workers that publish KV events get credit for exactly their blocks; others for served prompts."""

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


def reporting(
    router: Router, worker: RouterWorker, size: int, *events: KVEvent, engines: int = 1
) -> Callable[[KVEvent], bool]:
    """Start KV events of a worker; return the function that applies its next events."""
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
def test_any_block_size_is_supported(size: int) -> None:
    router = router_of(mixed=1, **SETTINGS)
    (worker,) = router.workers()
    prompt = list(range(48))
    report = reporting(router, worker, size, stored(prompt[: 48 // size * size], size))
    assert hits(router, prompt) == 48 // size * size // 4
    assert hits(router, [*prompt[:17], 99, 99, 99]) == 17 // size * size // 4
    last = stored(prompt[: 48 // size * size], size).keys[20 // size]
    assert report(Removed((last,)))
    assert hits(router, prompt) == 20 // size * size // 4, "a removed block and all after it no longer count"


def test_served_prompts_do_not_count_for_a_publishing_worker() -> None:
    router = router_of(mixed=1, **SETTINGS)
    (worker,) = router.workers()
    prompt = list(range(16))
    serve(router, prompt)
    assert hits(router, prompt) == 4
    report = reporting(router, worker, 4)
    assert hits(router, prompt) == 0 and shown(router, worker).held_blocks == 0
    serve(router, prompt)
    assert hits(router, prompt) == 0, "it was served, but is not reported"
    event = stored(prompt, 4)
    report(event)
    assert hits(router, prompt) == 4 and shown(router, worker).held_blocks == 4
    report(Removed(event.keys))
    assert hits(router, prompt) == 0
    report(stored(prompt, 4))
    report(Cleared())
    assert hits(router, prompt) == 0 and shown(router, worker).kv_events == 4
    router.reported_kv.end(worker)
    assert hits(router, prompt) == 4 and shown(router, worker).held_blocks is None
    assert report(stored(prompt, 4)) is False, "the worker is no longer followed"
    assert shown(router, worker).held_blocks is None


def test_hits_are_those_of_the_best_engine() -> None:
    """Engines name a prefix by equal or by different keys; blocks of several engines are never combined."""
    router = router_of(mixed=2, **SETTINGS)
    worker, other = router.workers()
    prompt = list(range(16))
    whole, half = stored(prompt, 4), stored(prompt[:8], 4)
    report = reporting(router, worker, 4, half, replace(whole, engine=2), engines=3)
    reporting(router, other, 4, stored(prompt[:12], 4))
    with chosen(router.select(request(prompt), 0.0, 0.0)) as selection:
        assert (selection.decode, selection.hits) == (worker, 4)
    assert shown(router, worker).held_blocks == 2 + 4
    report(Removed(whole.keys[:1], engine=2))
    with chosen(router.select(request(prompt), 0.0, 0.0)) as selection:
        assert (selection.decode, selection.hits) == (other, 3)
    router.deregister(other.url, 0.0)
    assert hits(router, prompt) == 2, "blocks of two engines are not combined"
    report(Cleared(engine=2))
    assert hits(router, prompt) == 2 and shown(router, worker).held_blocks == 2
    report(Cleared())
    assert hits(router, prompt) == 0
    router.reported_kv.end(worker)
    assert not router.reported_kv._holders and not router.reported_kv._sizes and not router.reported_kv._further


@pytest.mark.parametrize("engine", [2, -1])
def test_event_of_an_unknown_engine_is_rejected(engine: int) -> None:
    router = router_of(mixed=1, **SETTINGS)
    report = reporting(router, router.workers()[0], 4, engines=2)
    with pytest.raises(ValueError, match="unknown engine"):
        report(Cleared(engine=engine))


@pytest.mark.parametrize("engines", [0, 1 << 20])
def test_invalid_number_of_engines_is_rejected(engines: int) -> None:
    router = router_of(mixed=1, **SETTINGS)
    with pytest.raises(ValueError, match="engines"):
        router.reported_kv.begin(router.workers()[0], 4, "p", engines)


def test_reported_blocks_do_not_expire() -> None:
    router = router_of(mixed=1, **SETTINGS)
    (worker,) = router.workers()
    reporting(router, worker, 4, stored(list(range(16)), 4))
    with chosen(router.select(request(range(16)), 1e9, 0.0)) as selection:
        assert selection.hits == 4


def test_cache_aware_compares_reported_and_served_prefixes() -> None:
    router = router_of(mixed=2, **SETTINGS)
    first, second = router.workers()
    prompt = list(range(16))
    assert serve(router, prompt) == first
    reporting(router, first, 4)
    reporting(router, second, 2, stored(prompt, 2))
    assert place(router, prompt).decode == second


def test_adapter_prompts_do_not_match_reported_blocks() -> None:
    """Workers publish only the blocks of the base model."""
    router = router_of(mixed=1, **SETTINGS)
    (worker,) = router.workers()
    prompt = list(range(16))
    router.serves(worker, ["base", "sql"], ["sql"])
    reporting(router, worker, 4, stored(prompt, 4))
    assert (hits(router, prompt, model="sql"), hits(router, prompt, model="base")) == (0, 4)
    with chosen(router.select(request(prompt, model="sql"), 0.0, 0.0)) as selection:
        router.served(selection, 0.0)
    assert hits(router, prompt, model="sql") == 4, "served prompts count"


def test_salted_and_byte_prompts_do_not_match_reported_blocks() -> None:
    router = router_of(mixed=1, **SETTINGS)
    (worker,) = router.workers()
    prompt = list(range(16))
    reporting(router, worker, 4, stored(prompt, 4))
    assert (hits(router, prompt, salt="tenant"), hits(router, prompt, tokenized=False)) == (0, 0)
    for more in ({"salt": "tenant"}, {"tokenized": False}):
        with chosen(router.select(request([7] * 16, **more), 0.0, 0.0)) as selection:
            router.served(selection, 0.0)
        assert hits(router, [7] * 16, **more) == 4, "served prompts count"
    assert hits(router, [7] * 16) == 0, "a salted prompt gave credit to an unsalted one"


def test_events_apply_to_their_own_incarnation() -> None:
    router = router_of(**SETTINGS)
    first = add(router, "http://w", instance="a")
    prompt = list(range(16))
    assert not router.reported_kv.begin(first, 4, "b"), "another process has this address now"
    assert router.reported_kv.begin(first, 4, "a")
    assert router.reported_kv.apply(first, stored(prompt, 4))
    second = router.health(first, True, 1.0, instance="b")
    assert second != first
    assert router.reported_kv.apply(first, stored(list(range(16, 32)), 4)) is False
    assert (hits(router, prompt), hits(router, list(range(16, 32)))) == (0, 0)
    assert shown(router, second).held_blocks is None and shown(router, second).kv_events == 0
    assert not router.reported_kv.begin(first, 4, "a")


def test_deregistered_worker_is_forgotten() -> None:
    router = router_of(mixed=1, **SETTINGS)
    (worker,) = router.workers()
    report = reporting(router, worker, 4, stored(list(range(16)), 4))
    router.deregister(worker.url, 0.0)
    assert not report(Cleared()) and not router.reported_kv._mirrors and not router.reported_kv._num_events


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Stored(b"unknown", (b"k",), ids([1] * 4)), "does not hold"),
        (Stored(BEGINNING, (b"k",), ids([1] * 3)), "without all their tokens"),
        (Stored(BEGINNING, (), b""), "without all their tokens"),
        (stored(list(range(40)), 4), "more blocks than max-index-blocks"),
    ],
)
def test_invalid_event_is_rejected(event: KVEvent, message: str) -> None:
    router = router_of(mixed=1, max_index_blocks=8, **SETTINGS)
    report = reporting(router, router.workers()[0], 4)
    with pytest.raises(ValueError, match=message):
        report(event)


@pytest.mark.parametrize("size", [0, -1, 1 << 20])
def test_invalid_block_size_is_rejected(size: int) -> None:
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
def test_router_mirrors_the_blocks_of_a_worker(
    calls: list[tuple[str, list[int]]], query: list[int], size: int, router_size: int
) -> None:
    """A worker stores and evicts in any order, children before parents or after; a router may join late."""
    hasher = PrefixHasher(block_size=size, identity="worker", secret=b"its own")
    recorder, held, known = Recorder(), StoredBlocks(size), dict[bytes, int]()
    router = router_of(mixed=1, policy="cache_aware", cache_block_size=router_size)
    (worker,) = router.workers()
    report = reporting(router, worker, size)

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
            assert report(event)
        if call == "late":
            report = reporting(router, worker, size, *held.events())
    expected = 0
    for key in chain_of(query):
        if key not in known:
            break
        expected += size
    assert hits(router, query) == expected // router_size
    assert shown(router, worker).held_blocks == len(known)
