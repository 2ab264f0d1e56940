"""Search for the cheapest plan, against synthetic plans whose optimum is found by brute force."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.simulation.planning.search import PlanSearch, PlanShape, PlanTrial

Margin = Callable[[PlanTrial], float]
SEEDS = (0, 1, 2)


def searched(shapes: list[PlanShape], margin: Margin, *, shortened: bool = True) -> tuple[PlanSearch, list[PlanTrial]]:
    """Run the search; return its result and every plan that it tried."""
    search = PlanSearch(shapes, SEEDS, shortened=shortened)
    tried: list[PlanTrial] = []
    trials = search.trials()
    try:
        batch = next(trials)
        while True:
            tried += batch
            assert len(tried) < 10_000
            batch = trials.send([margin(trial) for trial in batch])
    except StopIteration:
        return search, tried


def made_up(draw: random.Random) -> tuple[list[PlanShape], list[float]]:
    """Return shapes, and the number of units each needs, some of them unavailable."""
    needs = [draw.uniform(0.3, 40) for _ in range(draw.randint(1, 12))]
    shapes = [
        PlanShape(draw.choice([1.0, 2.0, 2.5, 4.0, 8.0]), draw.randint(1, math.ceil(need)), draw.randint(4, 60))
        for need in needs
    ]
    shapes = [PlanShape(each.cost, min(each.least, each.most), each.most) for each in shapes]
    return shapes, needs


def is_checked(search: PlanSearch, shape: int) -> bool:
    """Return True if the fewest units satisfied the SLO for the whole workload with every seed."""
    trials = [PlanTrial(shape, search.units[shape], seed, True) for seed in search.seeds]
    return all(search.margins.get(trial, -1) >= 0 for trial in trials)


@pytest.mark.parametrize("seed", range(80))
def test_search_finds_the_cheapest_plan(seed: int) -> None:
    draw = random.Random(seed)
    shapes, needs = made_up(draw)
    easier = [draw.uniform(0.6, 1) for _ in shapes]  # the first requests meet shorter queues

    def margin(trial: PlanTrial) -> float:
        need = needs[trial.shape] * trial.load * (1 if trial.whole else easier[trial.shape])
        return 1 - need / trial.units

    search, tried = searched(shapes, margin, shortened=seed % 2 == 0)
    costs = [
        shape.cost * math.ceil(need) for shape, need in zip(shapes, needs, strict=True) if math.ceil(need) <= shape.most
    ]
    ranking = search.ranking()
    assert bool(ranking) is bool(costs)
    assert all(shapes[trial.shape].least - 1 <= trial.units <= shapes[trial.shape].most for trial in tried)
    assert len(set(tried)) == len(tried)
    if not costs:
        return
    best = ranking[0]
    assert search.cost(best) == min(costs)
    assert is_checked(search, best)
    assert search.units[best] == 1 or search.breaks_below(best) is not None
    true_factor = search.units[best] / needs[best]
    assert search.holds_load is not None
    assert search.holds_load <= true_factor
    if search.breaks_load is not None:
        assert true_factor < search.breaks_load <= search.holds_load * 1.06


@pytest.mark.parametrize("seed", range(30))
def test_noise_shifts_result_by_at_most_the_noise(seed: int) -> None:
    draw = random.Random(seed)
    shapes, needs = made_up(draw)

    def margin(trial: PlanTrial) -> float:
        noise = random.Random(f"{seed}/{trial}").uniform(-0.1, 0.1)
        return 1 - needs[trial.shape] * trial.load / trial.units + noise

    search, _ = searched(shapes, margin)
    for shape in search.ranking()[:1]:
        assert is_checked(search, shape)
        assert search.units[shape] >= needs[shape] / 1.1 - 1e-9
        surely = [
            each.cost * math.ceil(need / 0.9)
            for each, need in zip(shapes, needs, strict=True)
            if math.ceil(need / 0.9) <= each.most
        ]
        assert not surely or search.cost(shape) <= min(surely) + shapes[shape].cost
        assert search.units[shape] == 1 or search.breaks_below(shape) is not None


def test_equal_costs_are_decided_by_margin() -> None:
    shapes = [PlanShape(4.0, 1, 8) for _ in range(3)]
    search, _ = searched(shapes, lambda trial: (0.1, 0.4, 0.2)[trial.shape] - (trial.load - 1))
    assert search.ranking() == [1, 2, 0]


def test_shapes_above_best_cost_are_not_simulated() -> None:
    shapes = [PlanShape(1.0, 1, 100), *(PlanShape(10.0, 5, 100) for _ in range(20))]
    _, tried = searched(shapes, lambda trial: 1 - 3 * trial.load / trial.units)
    assert {trial.shape for trial in tried if trial.shape > 4} == set()


def test_large_fleet_needs_few_simulations() -> None:
    search, tried = searched([PlanShape(1.0, 1, 10_000)], lambda trial: 1 - 4321.5 * trial.load / trial.units)
    assert search.units == {0: 4322}
    assert len(tried) < 50


SPACES = st.lists(st.tuples(st.sampled_from((1.0, 2.0, 2.5, 4.0)), st.integers(1, 9)), min_size=1, max_size=5)


def cheapest(shapes: list[PlanShape], margin: Margin) -> float | None:
    """Return the lowest cost of a plan that satisfies the SLO with every seed, by brute force."""
    return min(
        (
            about.cost * units
            for shape, about in enumerate(shapes)
            for units in range(1, about.most + 1)
            if all(margin(PlanTrial(shape, units, seed, True)) >= 0 for seed in SEEDS)
        ),
        default=None,
    )


@settings(deadline=None, max_examples=150)
@given(SPACES, st.randoms(use_true_random=False), st.booleans())
def test_harder_first_requests_do_not_hide_a_cheaper_plan(
    space: list[tuple[float, int]], draw: random.Random, shortened: bool
) -> None:
    shapes = [PlanShape(cost, 1, most) for cost, most in space]
    needs = [[draw.uniform(0.3, 11) * draw.uniform(0.95, 1)] * 3 for _ in shapes]
    needs = [[need * draw.uniform(0.9, 1.1) for need in each] for each in needs]
    first = [draw.uniform(0.6, 1.45) for _ in shapes]

    def margin(trial: PlanTrial) -> float:
        need = needs[trial.shape][trial.seed] * trial.load
        return 1 - need * (1 if trial.whole else first[trial.shape]) / trial.units

    search, tried = searched(shapes, margin, shortened=shortened)
    least = cheapest(shapes, margin)
    assert len(set(tried)) == len(tried)
    assert [search.cost(shape) for shape in search.ranking()[:1]] == ([] if least is None else [least])


@settings(deadline=None, max_examples=300)
@given(SPACES, st.integers(0, 2**32), st.floats(0.05, 0.95), st.booleans())
def test_result_is_minimal_for_non_monotonic_margins(
    space: list[tuple[float, int]], world: int, chance: float, shortened: bool
) -> None:
    shapes = [PlanShape(cost, 1, most) for cost, most in space]

    def margin(trial: PlanTrial) -> float:
        return chance - random.Random(f"{world}/{trial}").random()

    search, tried = searched(shapes, margin, shortened=shortened)
    assert search.finished
    assert len(set(tried)) == len(tried)
    for shape in search.ranking()[:1]:
        units = search.units[shape]
        assert all(margin(PlanTrial(shape, units, seed, True)) >= 0 for seed in SEEDS)
        below = search.breaks_below(shape)
        assert units == 1 or (below is not None and margin(below) < 0)
        assert search.cost(shape) >= (cheapest(shapes, margin) or math.inf)


def test_loads_stay_within_limits() -> None:
    search = PlanSearch([PlanShape(1.0, 1, 3)], SEEDS, shortened=False, most_load=1.6)
    trials, loads = search.trials(), set()
    with pytest.raises(StopIteration):
        batch = next(trials)
        while True:
            loads |= {trial.load for trial in batch}
            batch = trials.send([0.5] * len(batch))
    assert loads == {1.0, 1.1, 1.25, 1.5}
    assert (search.holds_load, search.breaks_load) == (1.5, None)
