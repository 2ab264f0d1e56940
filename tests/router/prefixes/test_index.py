"""The index compared with a plain dictionary, and its cost."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fd_core.router.prefix_index import PrefixesInFlight, PrefixIndex, block_hasher, block_keys
from fd_core.router.selection import WorkerIndices
from fd_core.router.workers import RouterWorker

WORKERS = [RouterWorker(f"http://{name}", "mixed", number) for number, name in enumerate("abc")]
HASHER = block_hasher(2)
PROMPTS = st.lists(st.integers(0, 1), max_size=9)


def keys(tokens: Sequence[int], salt: str = "") -> tuple[bytes, ...]:
    return block_keys(HASHER, np.array(tokens, np.int32), salt)


def slots() -> WorkerIndices:
    """Return slots in the order of WORKERS."""
    made = WorkerIndices()
    made.among(WORKERS)
    return made


def prefixes(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[: end + 2]) for end in range(0, len(tokens) - 1, 2)]


def test_key_covers_all_tokens_up_to_its_block_and_the_salt() -> None:
    assert len(keys([1, 2, 3])) == 1 and keys([1]) == ()
    assert keys([1, 2, 3, 4])[:1] == keys([1, 2, 9])
    assert keys([1, 2, 3, 4])[1] != keys([5, 2, 3, 4])[1]
    assert keys([1, 2]) != keys([1, 2], "tenant")


@given(
    st.lists(
        st.tuples(st.sampled_from(["record", "remove", "sweep"]), st.sampled_from(WORKERS), PROMPTS, st.integers(0, 4))
    ),
    PROMPTS,
)
def test_index_matches_a_dictionary_of_prefixes(
    calls: list[tuple[str, RouterWorker, list[int], int]], query: list[int]
) -> None:
    index = PrefixIndex(duration=10.0, capacity=1000, indices=slots())
    model: dict[tuple[RouterWorker, tuple[int, ...]], float] = {}
    now = 0.0
    for call, worker, tokens, passed in calls:
        now += passed
        if call == "record":
            index.record(worker, keys(tokens), now)
            model.update(dict.fromkeys(((worker, prefix) for prefix in prefixes(tokens)), now))
        elif call == "remove":
            index.remove(worker)
            model = {entry: written for entry, written in model.items() if entry[0] != worker}
        else:
            index.sweep(now)
            for one in WORKERS:
                alive = [entry for entry, written in model.items() if entry[0] == one and now - written < 10.0]
                assert index.blocks(one) == len(alive)
    for worker in WORKERS:
        expected = 0
        for prefix in prefixes(query):
            if now - model.get((worker, prefix), -1000.0) >= 10.0:
                break
            expected += 1
        assert index.match(keys(query), now)[WORKERS.index(worker)] == expected


@given(st.lists(PROMPTS, max_size=20), st.integers(1, 6))
def test_bounded_index_keeps_whole_paths_and_the_last_prompt(prompts: list[list[int]], capacity: int) -> None:
    index = PrefixIndex(duration=10.0, capacity=capacity, indices=slots())
    for tokens in prompts:
        index.record(WORKERS[0], keys(tokens), 0.0)
        assert index.blocks(WORKERS[0]) <= capacity
        assert index.match(keys(tokens), 0.0)[0] == min(capacity, len(keys(tokens)))
    reachable = {key for tokens in prompts for key in keys(tokens)[: index.match(keys(tokens), 0.0)[0]]}
    assert len(reachable) == index.blocks(WORKERS[0])


def test_each_worker_gets_its_own_longest_prefix() -> None:
    index = PrefixIndex(duration=10.0, capacity=100, indices=slots())
    index.record(WORKERS[0], keys([1, 2, 3, 4, 5, 6]), 0.0)
    index.record(WORKERS[1], keys([1, 2, 3, 4]), 0.0)
    query = keys([1, 2, 3, 4, 5, 6, 7, 8])
    assert index.match(query, 0.0).tolist() == [3, 2, 0]


def test_matching_does_not_extend_the_lifetime() -> None:
    index = PrefixIndex(duration=10.0, capacity=100, indices=slots())
    index.record(WORKERS[0], keys([1, 2]), 0.0)
    assert index.match(keys([1, 2]), 9.0)[0] == 1
    assert index.match(keys([1, 2]), 10.0)[0] == 0


def test_serving_the_same_prompt_again_takes_no_memory() -> None:
    index, prompt = PrefixIndex(duration=1e9, capacity=100, indices=slots()), keys([1, 2, 3, 4])
    index.record(WORKERS[0], prompt, 0.0)
    tracemalloc.start()
    for number in range(1, 5000):
        index.record(WORKERS[0], prompt, float(number))
    assert tracemalloc.get_traced_memory()[0] < 20_000
    tracemalloc.stop()


class CountedKey(bytes):
    """A key that counts its hash lookups."""

    looks: ClassVar[int] = 0

    def __hash__(self) -> int:
        CountedKey.looks += 1
        return super().__hash__()

    __eq__ = bytes.__eq__


def looks(prompts: int, blocks: int) -> int:
    """Return the work to match and record a prompt of `blocks` blocks in an index of `prompts` prompts."""
    index = PrefixIndex(duration=10.0, capacity=prompts * blocks, indices=slots())
    chains = [[CountedKey(b"%d/%d" % (prompt, block)) for block in range(blocks)] for prompt in range(prompts)]
    for chain in chains:
        index.record(WORKERS[0], chain, 0.0)
    CountedKey.looks = 0
    assert index.match(chains[0], 0.0)[0] == blocks
    index.record(WORKERS[0], chains[0], 0.0)
    return CountedKey.looks


def test_cost_depends_on_the_prompt_and_not_on_the_index() -> None:
    once = looks(4, 16)
    assert once <= 16 * 4
    assert [looks(4 * times, 16) for times in (4, 16)] == [once, once]
    assert once < looks(4, 16 * 4) <= once * 4


def test_matching_probes_few_blocks_of_a_long_prompt() -> None:
    index = PrefixIndex(duration=10.0, capacity=10_000, indices=slots())
    chain = [CountedKey(b"%d" % block) for block in range(8192)]
    index.record(WORKERS[0], chain[:5000], 0.0)
    CountedKey.looks = 0
    assert index.match(chain, 0.0)[0] == 5000
    assert CountedKey.looks <= 14


@given(st.lists(st.tuples(st.sampled_from(WORKERS), PROMPTS), max_size=8), PROMPTS, st.data())
def test_prompts_in_flight_count_until_they_end(
    given_out: list[tuple[RouterWorker, list[int]]], query: list[int], data: st.DataObject
) -> None:
    in_flight = PrefixesInFlight(slots())
    for worker, tokens in given_out:
        in_flight.begin(worker, keys(tokens))
    for ended in data.draw(st.lists(st.sampled_from(given_out), unique_by=id) if given_out else st.just([])):
        given_out.remove(ended)
        in_flight.end(ended[0], keys(ended[1]))
    found = in_flight.match(keys(query))
    for worker in WORKERS:
        shared = (
            len(set(prefixes(query)) & set(prefixes(tokens))) for computes, tokens in given_out if computes == worker
        )
        assert (0 if found is None else found[WORKERS.index(worker)]) == max(shared, default=0)
    assert len(in_flight) == len({(worker, prefix) for worker, tokens in given_out for prefix in prefixes(tokens)})


def looks_in_flight(prompts: int, shared: int, own: int) -> int:
    """Return the work to begin, match and end one prompt among `prompts` that share its first blocks."""
    in_flight = PrefixesInFlight(slots())
    system = [CountedKey(b"%d" % block) for block in range(shared)]
    chains = [(*system, *(CountedKey(b"%d/%d" % (each, block)) for block in range(own))) for each in range(prompts)]
    for chain in chains[1:]:
        in_flight.begin(WORKERS[0], chain)
    CountedKey.looks = 0
    found = in_flight.match(chains[0])
    assert found is not None and found[0] == shared
    in_flight.begin(WORKERS[0], chains[0])
    in_flight.end(WORKERS[0], chains[0])
    return CountedKey.looks


def test_prompt_in_flight_costs_only_its_unshared_blocks() -> None:
    once = looks_in_flight(10, shared=30, own=4)
    assert once <= 8 * (4 + 1) + 8
    assert looks_in_flight(1000, shared=30, own=4) == once
    assert looks_in_flight(10, shared=3000, own=4) <= once + 7
