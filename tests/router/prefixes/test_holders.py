"""Blocks of many workers in one table, compared with one set per worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fd_core.router.prefix_index import Holders
from fd_core.router.selection import WorkerIndices
from fd_core.router.workers import RouterWorker

WORKERS = [RouterWorker(f"http://{number}", "mixed", number) for number in range(40)]
KEYS = [b"%d" % number for number in range(6)]


def leading(held: set[bytes]) -> int:
    return next((count for count, key in enumerate(KEYS) if key not in held), len(KEYS))


@given(st.lists(st.tuples(st.integers(0, 39), st.integers(0, 6)), max_size=80), st.integers(0, 40))
def test_prefixes_match_to_their_full_length(paths: list[tuple[int, int]], left: int) -> None:
    slots = WorkerIndices()
    holders, model = Holders(slots), dict.fromkeys(WORKERS, 0)
    for number, length in paths:
        worker = WORKERS[number]
        holders.add(worker, KEYS[model[worker] : length])
        model[worker] = max(model[worker], length)
    for worker in WORKERS[:left]:  # the slots of leaving workers are reused
        holders.discard(worker, KEYS)
        slots.release(worker)
        model[worker] = 0
    late = RouterWorker("http://late", "mixed", 99)
    holders.add(late, KEYS[:2])
    all_workers = slots.among([*WORKERS, late])
    assert holders.leading(KEYS)[all_workers].tolist() == [*model.values(), 2]
    assert holders.unbroken(iter(KEYS))[all_workers].tolist() == [*model.values(), 2]
    assert not holders.leading([]).any()


@given(st.lists(st.tuples(st.integers(0, 39), st.sampled_from(KEYS), st.booleans()), max_size=120))
def test_blocks_without_their_parents_do_not_count(changes: list[tuple[int, bytes, bool]]) -> None:
    slots = WorkerIndices()
    holders, model = Holders(slots), {worker: set[bytes]() for worker in WORKERS}
    for number, key, held in changes:
        worker = WORKERS[number]
        (holders.add if held else holders.discard)(worker, [key])
        (model[worker].add if held else model[worker].discard)(key)
    all_workers = slots.among(WORKERS)
    assert holders.unbroken(KEYS)[all_workers].tolist() == [leading(model[worker]) for worker in WORKERS]
    assert len(holders) == len({key for held in model.values() for key in held})


def test_lookup_stops_at_the_first_unheld_key() -> None:
    slots, read_keys = WorkerIndices(), []
    slots.among(WORKERS[:2])
    holders = Holders(slots)
    holders.add(WORKERS[0], KEYS[:2])

    def keys():
        for key in KEYS:
            read_keys.append(key)
            yield key

    assert holders.unbroken(keys()).tolist() == [2, 0]
    assert read_keys == KEYS[:3]


class Counted(Holders):
    """Counts its lookups."""

    looks = 0

    def get(self, key: bytes, default: int = 0) -> int:  # type: ignore[override]
        Counted.looks += 1
        return super().get(key, default)


def test_workers_with_equal_blocks_cost_one_lookup() -> None:
    looks = []
    for count in (1, 1000):
        holders = Counted(WorkerIndices())
        workers = [RouterWorker(f"http://{number}", "mixed", number) for number in range(count)]
        keys = [b"%d" % number for number in range(512)]
        for worker in workers:
            holders.add(worker, keys[:300])
        holders.add(workers[0], keys[300:400])
        Counted.looks = 0
        assert holders.leading(keys).tolist() == [400, *[300] * (count - 1)]
        looks.append(Counted.looks)
    assert looks[0] <= 10 and looks[1] <= 20
