"""Blocks of many workers in one table, against a set for each worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fd_core.router.prefix_index import Holders
from fd_core.router.selection import Places
from fd_core.router.workers import RouterWorker

WORKERS = [RouterWorker(f"http://{number}", "mixed", number) for number in range(40)]
KEYS = [b"%d" % number for number in range(6)]


def leading(held: set[bytes]) -> int:
    return next((count for count, key in enumerate(KEYS) if key not in held), len(KEYS))


@given(st.lists(st.tuples(st.integers(0, 39), st.integers(0, 6)), max_size=80), st.integers(0, 40))
def test_paths_from_the_beginning_are_found_as_long_as_they_are(paths: list[tuple[int, int]], left: int) -> None:
    places = Places()
    holders, model = Holders(places), dict.fromkeys(WORKERS, 0)
    for number, length in paths:
        worker = WORKERS[number]
        holders.add(holders.bit(worker), KEYS[model[worker] : length])
        model[worker] = max(model[worker], length)
    for worker in WORKERS[:left]:  # the places of those who leave are given on
        holders.discard(holders.bit(worker), KEYS)
        places.leave(worker)
        model[worker] = 0
    late = RouterWorker("http://late", "mixed", 99)
    holders.add(holders.bit(late), KEYS[:2])
    everybody = places.among([*WORKERS, late])
    assert holders.leading(KEYS)[everybody].tolist() == [*model.values(), 2]
    assert holders.unbroken(iter(KEYS))[everybody].tolist() == [*model.values(), 2]
    assert not holders.leading([]).any()


@given(st.lists(st.tuples(st.integers(0, 39), st.sampled_from(KEYS), st.booleans()), max_size=120))
def test_blocks_without_those_before_them_do_not_count(changes: list[tuple[int, bytes, bool]]) -> None:
    places = Places()
    holders, model = Holders(places), {worker: set[bytes]() for worker in WORKERS}
    for number, key, held in changes:
        worker = WORKERS[number]
        (holders.add if held else holders.discard)(holders.bit(worker), [key])
        (model[worker].add if held else model[worker].discard)(key)
    everybody = places.among(WORKERS)
    assert holders.unbroken(KEYS)[everybody].tolist() == [leading(model[worker]) for worker in WORKERS]
    assert len(holders) == len({key for held in model.values() for key in held})


def test_nobody_is_asked_for_more_keys_than_somebody_holds() -> None:
    places, asked = Places(), []
    places.among(WORKERS[:2])
    holders = Holders(places)
    holders.add(holders.bit(WORKERS[0]), KEYS[:2])

    def keys():
        for key in KEYS:
            asked.append(key)
            yield key

    assert holders.unbroken(keys()).tolist() == [2, 0]
    assert asked == KEYS[:3]


class Counted(dict[bytes, int]):
    """A table that counts how often somebody looks."""

    looks = 0

    def get(self, key: bytes, default: int = 0) -> int:  # type: ignore[override]
        Counted.looks += 1
        return super().get(key, default)


def test_a_thousand_workers_that_hold_the_same_are_looked_up_as_one() -> None:
    looks = []
    for count in (1, 1000):
        holders = Holders(Places())
        workers = [RouterWorker(f"http://{number}", "mixed", number) for number in range(count)]
        keys = [b"%d" % number for number in range(512)]
        for worker in workers:
            holders.add(holders.bit(worker), keys[:300])
        holders.add(holders.bit(workers[0]), keys[300:400])
        holders._of = Counted(holders._of)
        Counted.looks = 0
        assert holders.leading(keys).tolist() == [400, *[300] * (count - 1)]
        looks.append(Counted.looks)
    assert looks[0] <= 10 and looks[1] <= 20
