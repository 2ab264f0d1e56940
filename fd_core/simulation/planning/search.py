"""Search for the next plans to simulate: pure, margins of simulated plans in, plans to simulate out.

A *shape* is everything about a deployment but its size; a *unit* of it is one worker, or the prefill and decode workers
of one ratio. More units are assumed never to violate an SLO that fewer meet, up to noise: the answer runs with every
seed, and so is the plan with one unit less, which must fail.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import msgspec

_AT_ONCE = 4
"""Shapes that are run in parallel. The answer must not depend on the number of processes."""
LOADS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Loads at which the chosen plan is tried, as a factor of the requested load."""
_NEARLY = -0.5
"""Margin on the first requests from which a shape is tried on all of them, whose percentiles may be better."""
_LOAD_STEP = 1.05
"""Largest ratio of the violating load to the load that is met."""


class PlanShape(msgspec.Struct, frozen=True):
    """A shape, as the search sees it."""

    cost: float
    """Cost of a unit, above 0."""
    least: int
    """Units below which it cannot meet the SLO, at least 1."""
    most: int


class PlanTrial(msgspec.Struct, frozen=True):
    """A plan to simulate."""

    shape: int
    """Its index among the shapes."""
    units: int
    seed: int
    whole: bool
    """True for the whole workload, False for its first requests."""
    load: float = 1.0


class PlanSearch:
    """One search. `trials` yields plans and is sent their margins; a margin below 0 violates the SLO."""

    def __init__(
        self,
        shapes: Sequence[PlanShape],
        seeds: Sequence[int],
        *,
        shortened: bool,
        runners_up: int = 3,
        most_load: float = math.inf,
    ) -> None:
        """`shortened`: if the first requests are not all. `most_load`: largest possible factor of the load."""
        self.shapes = tuple(shapes)
        self.seeds = tuple(seeds)
        self.margins: dict[PlanTrial, float] = {}
        self.units: dict[int, int] = {}
        """By shape, the fewest units that are known to meet it so far."""
        self.holds_load: float | None = None
        """Largest factor of the load that the chosen plan sustains; None if it was not tried."""
        self.breaks_load: float | None = None
        """Smallest factor that violates the SLO; None if none did."""
        self.finished = False
        self._failed = [shape.least - 1 for shape in self.shapes]
        """By shape, the most units that are known to violate it so far."""
        self._shortened = shortened
        self._runners_up = runners_up
        self._most_load = most_load

    def trials(self) -> Generator[list[PlanTrial], Sequence[float], None]:
        """Yield plans to simulate together; send their margins, in the same order."""
        settled = False
        while not settled:
            # A shape that was too expensive may be competitive again once the best turns out to need more.
            yield from self._size()
            settled = yield from self._settle()
            if settled and self._shortened:
                settled = yield from self._challenge()
        if self.ranking():
            yield from self._load(self.ranking()[0])
        self.finished = True

    def ranking(self) -> list[int]:
        """Return the shapes that meet the SLO so far: the cheapest first, of equal ones that with the most margin."""
        return sorted(self.units, key=lambda shape: (round(self.cost(shape), 9), -self.margin(shape), shape))

    def cost(self, shape: int) -> float:
        """Return the cost of the fewest units that meet it."""
        return self.shapes[shape].cost * self.units[shape]

    def margin(self, shape: int) -> float:
        """Return the least margin of the runs of a shape's fewest units: of those on the whole workload if any."""
        whole = self._of(shape, self.units[shape])
        return min(whole.values(), default=self.margins.get(self._short(shape, self.units[shape]), -math.inf))

    def breaks_below(self, shape: int) -> PlanTrial | None:
        """Return the trial in which one unit less violated the SLO; None if that was not tried or there is none."""
        trials = (trial for trial in self._whole(shape, self.units[shape] - 1) if self.margins.get(trial, 0) < 0)
        return next(trials, None)

    def _size(self) -> Generator[list[PlanTrial], Sequence[float], None]:
        """Find the fewest units of each shape on the first requests, as long as it costs no more than the best."""
        order = sorted(range(len(self.shapes)), key=lambda each: self.shapes[each].cost * self.shapes[each].least)
        while True:
            best = min((self.cost(shape) for shape in self.units), default=math.inf)
            batch: list[PlanTrial] = []
            for shape in order:
                if len(batch) < _AT_ONCE and (units := self._next(shape, self._failed[shape], best)) is not None:
                    batch.append(self._short(shape, units))
            if not batch:
                return
            for trial, margin in (yield from self._ask(batch)).items():
                if margin >= 0:
                    self.units[trial.shape] = trial.units
                else:
                    self._failed[trial.shape] = trial.units

    def _next(self, shape: int, failed: int, best: float) -> int | None:
        """Return the units to try next: double until they meet it, then bisect; at once the most that costs no more."""
        about = self.shapes[shape]
        most = about.most if best == math.inf else min(about.most, math.floor(best / about.cost + 1e-9))
        held = self.units.get(shape)
        if failed + 1 > most or held == failed + 1:
            return None
        if held is not None:
            return min((failed + held) // 2, most)
        if best < math.inf:
            return most
        return min(max(2 * failed, about.least), most)

    def _settle(self) -> Generator[list[PlanTrial], Sequence[float], bool]:
        """Request runs of the best with every seed, one unit less of it, or runners-up; return True if none is left."""
        ranking = self.ranking()
        if not ranking:
            return True
        best, *others = ranking
        batch = self._unknown(best, self.units[best])
        if self.units[best] > 1:
            # One violating seed is enough.
            batch += self._unknown(best, self.units[best] - 1)[:1]
        if not batch:
            batch = [each for shape in others[: self._runners_up] for each in self._unknown(shape, self.units[shape])]
        if not batch:
            return True
        yield from self._ask(batch)
        for shape in {trial.shape: None for trial in batch}:
            # More units where these fail on the whole workload, and fewer where fewer meet it with every seed.
            units = self.units[shape]
            while self._breaks(shape, units):
                units += 1
            while units > 1 and self._holds(shape, units - 1):
                units -= 1
            self._failed[shape] = units - 1 if units > self.units[shape] else min(self._failed[shape], units - 1)
            self.units[shape] = units
            if units > self.shapes[shape].most:
                del self.units[shape]
        return False

    def _challenge(self) -> Generator[list[PlanTrial], Sequence[float], bool]:
        """Request runs on all requests of cheaper shapes that nearly met the first; return True if none is left."""
        best = min((self.cost(shape) for shape in self.units), default=math.inf)
        batch: list[PlanTrial] = []
        for shape, about in enumerate(self.shapes):
            failed = self._failed[shape]
            units = failed if best == math.inf else min(failed, math.ceil(best / about.cost - 1e-9) - 1)
            nearly = self.margins.get(self._short(shape, failed), -math.inf) >= _NEARLY
            trial = PlanTrial(shape, units, self.seeds[0], whole=True)
            if nearly and units >= about.least and trial not in self.margins:
                batch.append(trial)
        if not batch:
            return True
        found = yield from self._ask(batch[:_AT_ONCE])
        for trial, margin in found.items():
            if margin >= 0:
                self.units[trial.shape] = trial.units
                self._failed[trial.shape] = trial.units - 1
        return False

    def _load(self, shape: int) -> Generator[list[PlanTrial], Sequence[float], None]:
        """Find the factor of the load at which the plan violates the SLO."""
        self.holds_load = 1.0
        loads = [load for load in LOADS if load <= self._most_load]
        while loads and self.breaks_load is None:
            yield from self._try_loads(shape, loads[:_AT_ONCE])
            loads = loads[_AT_ONCE:]
        while self.breaks_load is not None and self.breaks_load > self.holds_load * _LOAD_STEP:
            low, high = self.holds_load, self.breaks_load
            yield from self._try_loads(shape, [round(low + (high - low) * part / 3, 3) for part in (1, 2)])

    def _try_loads(self, shape: int, loads: list[float]) -> Generator[list[PlanTrial], Sequence[float], None]:
        trials = [PlanTrial(shape, self.units[shape], self.seeds[0], whole=True, load=load) for load in loads]
        found = yield from self._ask(trials)
        for trial in trials:
            if found[trial] < 0:
                self.breaks_load = trial.load
                return
            self.holds_load = trial.load

    def _ask(self, trials: list[PlanTrial]) -> Generator[list[PlanTrial], Sequence[float], dict[PlanTrial, float]]:
        margins = yield trials
        found = dict(zip(trials, margins, strict=True))
        self.margins |= found
        return found

    def _short(self, shape: int, units: int) -> PlanTrial:
        return PlanTrial(shape, units, self.seeds[0], whole=not self._shortened)

    def _whole(self, shape: int, units: int) -> list[PlanTrial]:
        return [PlanTrial(shape, units, seed, whole=True) for seed in self.seeds]

    def _of(self, shape: int, units: int) -> dict[PlanTrial, float]:
        return {trial: self.margins[trial] for trial in self._whole(shape, units) if trial in self.margins}

    def _unknown(self, shape: int, units: int) -> list[PlanTrial]:
        if self._breaks(shape, units):
            return []
        return [trial for trial in self._whole(shape, units) if trial not in self.margins]

    def _breaks(self, shape: int, units: int) -> bool:
        return any(margin < 0 for margin in self._of(shape, units).values())

    def _holds(self, shape: int, units: int) -> bool:
        return len(self._of(shape, units)) == len(self.seeds) and not self._breaks(shape, units)
