"""Figures of one run: latencies, rates, goodput, KV use, fairness and cost. Pure, from outcomes to numbers.

Latencies are those of completed requests. A percentile is the linear interpolation between the two values nearest to
its rank (type 7 of Hyndman and Fan, the default of numpy and of `fdcore bench`); none is estimated. Sums are
rounded once, so that figures do not depend on the processor.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.simulation.clock.waits import WAITS
from fd_core.simulation.results.slo import Slo


class RequestOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Outcome of one request. Times are seconds from the start of the run."""

    request_id: str
    tenant: str
    priority: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that hit a prefix cache."""
    output_tokens: int
    """Tokens that reached the client."""
    arrived: float
    first_token: float | None
    """Arrival of the first token at the client; None if none arrived."""
    ended: float
    end: str
    """`stop` or `length`; `left` if the client disconnected, `refused` if no worker accepted it, `failed` if the answer
    broke off, `abort` if an operator ended it."""
    reason: str
    """Reason of a rejection or failure; empty otherwise."""
    longest_gap: float
    """Longest time between two deliveries of tokens to the client."""
    worker: int
    """Index of the worker that answered; -1 if none did."""
    attempts: int


class WorkerSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """State of one worker at one time."""

    at: float
    worker: int
    waiting: int
    running: int
    used_blocks: int
    cached_blocks: int


class Absence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An interval in which a worker was out of service. Times are seconds from the start of the run."""

    worker: int
    begin: float
    end: float
    restarts: bool
    """True if its process existed and loaded another engine; False if there was no process."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated run."""

    label: str
    seed: int
    seconds: float
    """Virtual time from the first arrival to the last end."""
    wall_seconds: float
    """Wall time of the run; excluded from comparisons."""
    workers: tuple[str, ...]
    """Name of each worker, with its role."""
    blocks: tuple[int, ...]
    outcomes: tuple[RequestOutcome, ...]
    """In the order of their ends."""
    samples: tuple[WorkerSample, ...]
    counters: dict[str, float]
    """Sums over workers and routers, by metric name."""
    profile: str
    """Label of the costs with their origin, measured or calculated."""
    waits: bytes = b""
    """Time of each request by reason: float32[requests, 2, reasons], seconds, in the order of `outcomes`, before
    and after the first token, by `fd_core.simulation.clock.waits.WAITS`. Empty if not recorded."""
    absences: tuple[Absence, ...] = ()
    """In the order of their ends, including those cut off by the end of the run."""


PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0)
_MOST_TENANTS: Final = 50
_MOST_REASONS: Final = 20
_NUMBER: Final = re.compile(r"\d[\d,.]*(?<=\d)")

Numbers = npt.NDArray[np.float64]


class LatencyFigures(msgspec.Struct, frozen=True):
    """One latency of the requests that have it; seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class ObjectiveCheck(msgspec.Struct, frozen=True):
    """A limit over all requests, and its value in the run."""

    name: str
    limit: float
    value: float | None
    """Seconds, or a share for `attainment`. None is infinite: too many requests were never completed."""
    held: bool


class SloFigures(msgspec.Struct, frozen=True):
    """Compliance of a run with its SLO."""

    slo: str
    good: int
    """Requests that were completed within every limit of a request; a missing latency violates no limit."""
    attainment: float | None
    """Share of all requests that are good, 0 to 1; None without a request."""
    goodput: float
    checks: tuple[ObjectiveCheck, ...]
    """Every limit over all requests. A request that was rejected, failed or left counts as later than any limit."""
    held: bool


class TenantFigures(msgspec.Struct, frozen=True):
    """Figures of one tenant."""

    tenant: str
    requests: int
    completed: int
    output_tokens: int
    ttft_p99: float | None
    """Seconds; None if none of its requests was completed."""
    attainment: float | None
    """Share of its requests that are good; None without an SLO."""


class WaitFigures(msgspec.Struct, frozen=True):
    """Seconds that a request spent for one reason, means."""

    reason: str
    """Of `fd_core.simulation.clock.waits.WAITS`, `computing` among them."""
    before: float
    """Of completed requests before their first tokens; the sum over all reasons is the mean TTFT."""
    before_slowest: float
    """The same for the hundredth of them with the latest first tokens."""
    between: float
    """Of completed requests after their first tokens."""
    between_slowest: float
    """The same for the hundredth of them that took longest there."""
    lost: float
    """Of requests that were not completed, in all their time."""


class WorkerFigures(msgspec.Struct, frozen=True):
    """Use of one worker; means are over time."""

    worker: str
    requests: int
    """Requests that it answered, in whole or in part."""
    output_tokens: int
    running: float
    waiting: float
    kv_use: float | None
    """Share of its KV blocks that requests held while it served; None if nothing was sampled."""
    kv_peak: float | None
    away: float
    """Seconds without a process."""
    restarting: float
    """Seconds in which its process loaded another engine."""


class WorkerCost(msgspec.Struct, frozen=True):
    """Cost of workers from the first arrival to the last end, while their processes exist, idle or not."""

    worker_seconds: float
    worker_seconds_per_million: float | None
    """For a million output tokens; None if there are none."""
    device_hours_per_million: float | None
    price_per_million: float | None
    """In the currency of the hourly price of a worker; None without a price."""
    away_seconds: float
    """Worker-seconds without a process, which cost nothing."""
    restarting_seconds: float
    """Part of `worker_seconds` in which engines were reloaded."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a run. Also the schema of the JSON: fields in this order, entries of mappings by name."""

    label: str
    seed: int
    profile: str
    seconds: float
    requests: int
    completed: int
    left: int
    refused: int
    failed: int
    reasons: dict[str, int]
    """Reasons of rejections and failures, with N for numbers, the most frequent first; at most twenty and the rest."""
    retried: int
    """Requests that were tried on more than one worker."""
    prompt_tokens: int
    """Of completed requests, as are the next two."""
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    """Completed requests."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    latencies: dict[str, LatencyFigures]
    """By the names of `slo.MEASURES`; without those that no completed request has."""
    slo: SloFigures | None
    hit_rate: float | None
    """Share of prompt tokens that hit a prefix cache; None without a completed request."""
    kv_use: float | None
    """Mean over time and workers, while they served, of the share of KV blocks that requests held; None if nothing
    was sampled."""
    kv_peak: float | None
    """Largest of these of one worker."""
    running: float
    """Mean over time of the requests that all workers together computed."""
    waiting: float
    preemptions: int
    waiting_seconds: dict[str, float]
    """Summed over all requests, by reason, without compute time."""
    waits: tuple[WaitFigures, ...]
    """Time of requests by reason, those that took most of it first; reasons that no request had are omitted."""
    fairness_service: float | None
    """Jain's index of the tokens that each tenant got: 1 is equal, 1/n is one that got all. None with one tenant."""
    fairness_speed: float | None
    """Jain's index of tokens per second while the requests of each tenant were in progress; unlike the other it does
    not depend on equal demand."""
    tenants: tuple[TenantFigures, ...]
    """The fifty with the most requests, if there are several."""
    workers: tuple[WorkerFigures, ...]
    cost: WorkerCost
    counters: dict[str, float]


class _Columns:
    """Outcomes as arrays, one entry for each request."""

    def __init__(self, run: Run) -> None:
        outcomes = run.outcomes
        of_all = partial(column, outcomes)
        ends = list(map(attrgetter("end"), outcomes))
        self.ends = Counter(ends)
        self.completed = np.fromiter((end in ("stop", "length") for end in ends), np.bool_, len(ends))
        self.arrived = of_all("arrived")
        # None becomes NaN.
        self.first = np.array(list(map(attrgetter("first_token"), outcomes)), np.float64)
        self.ended = of_all("ended")
        self.prompt = of_all("prompt_tokens")
        self.cached = of_all("cached_tokens")
        self.output = of_all("output_tokens")
        self.worker = of_all("worker").astype(np.int64)
        self.retried = int(np.count_nonzero(of_all("attempts") > 1))
        several = self.output >= 2
        self.latencies: dict[str, Numbers] = {
            "ttft": self.first - self.arrived,
            "tpot": np.where(several, self.ended - self.first, np.nan) / np.maximum(self.output - 1, 1),
            "gap": np.where(several, of_all("longest_gap"), np.nan),
            "e2e": self.ended - self.arrived,
        }


def latencies_of(run: Run) -> dict[str, Numbers]:
    """Return the latencies of completed requests by measure, each float64[those that have it], seconds, sorted."""
    columns = _Columns(run)
    return {name: np.sort(_there(values[columns.completed])) for name, values in columns.latencies.items()}


def percentiles(values: Numbers, shares: Sequence[float]) -> list[float]:
    """Return the percentiles of at least one value, infinite after the last finite one; see the module for ranks."""
    ranks = [(len(values) - 1) * share / 100 for share in shares]
    near = sorted({edge for rank in ranks for edge in (math.floor(rank), math.ceil(rank))})
    placed = np.partition(values, near)

    def between(rank: float) -> float:
        low, high = float(placed[math.floor(rank)]), float(placed[math.ceil(rank)])
        return low if low == high else low + (high - low) * (rank - math.floor(rank))

    return [between(rank) for rank in ranks]


def jain(shares: Numbers) -> float | None:
    """Return Jain's index of fairness, 1/n to 1; None for fewer than two shares or if all are 0."""
    squares = math.fsum(shares * shares)
    return math.fsum(shares) ** 2 / (len(shares) * squares) if len(shares) > 1 and squares else None


def summarize(
    run: Run, slo: Slo | None = None, *, price_per_worker_hour: float | None = None, devices_per_worker: int = 1
) -> RunSummary:
    """Return the figures of a run; `slo` decides which requests are good."""
    columns = _Columns(run)
    done, count, seconds = columns.completed, len(run.outcomes), run.seconds
    sums = {name: int(getattr(columns, name)[done].sum()) for name in ("prompt", "cached", "output")}
    good = None
    if slo is not None:
        good = done.copy()
        for name, limit in slo.request_limits().items():
            good &= ~(columns.latencies[name] > limit)  # NaN is not above
    gone = _absent(run, columns)
    use = _WorkerUse(run, float(columns.ended.max(initial=0.0)), gone.sum(0))
    service, speed, tenants = _tenants(run, columns, good)
    waiting_seconds, waits = _waits(run, columns)
    away, restarting = map(math.fsum, gone)
    worker_seconds = len(run.workers) * seconds - away
    output, price = int(columns.output.sum()), price_per_worker_hour
    per_million = worker_seconds / output * 1e6 if output else None
    return RunSummary(
        label=run.label,
        seed=run.seed,
        profile=run.profile,
        seconds=seconds,
        requests=count,
        completed=int(np.count_nonzero(done)),
        left=columns.ends["left"],
        refused=columns.ends["refused"],
        failed=columns.ends["failed"],
        reasons=_reasons(run),
        retried=columns.retried,
        prompt_tokens=sums["prompt"],
        cached_tokens=sums["cached"],
        output_tokens=sums["output"],
        requests_per_s=_rate(int(np.count_nonzero(done)), seconds),
        prompt_tokens_per_s=_rate(sums["prompt"], seconds),
        output_tokens_per_s=_rate(sums["output"], seconds),
        latencies={
            name: _figures(there) for name, values in columns.latencies.items() if len(there := _there(values[done]))
        },
        slo=_kept(slo, columns, good, seconds=seconds) if slo is not None and good is not None else None,
        hit_rate=sums["cached"] / sums["prompt"] if sums["prompt"] else None,
        kv_use=use.kv_use,
        kv_peak=use.kv_peak,
        running=use.running,
        waiting=use.waiting,
        preemptions=int(run.counters.get("preemptions", 0)),
        waiting_seconds=waiting_seconds,
        waits=waits,
        fairness_service=service,
        fairness_speed=speed,
        tenants=tenants,
        workers=use.figures(run, columns, gone),
        cost=WorkerCost(
            worker_seconds=worker_seconds,
            worker_seconds_per_million=per_million,
            device_hours_per_million=None if per_million is None else per_million * devices_per_worker / 3600,
            price_per_million=None if per_million is None or price is None else per_million * price / 3600,
            away_seconds=away,
            restarting_seconds=restarting,
        ),
        counters=dict(sorted(run.counters.items())),
    )


def column(rows: Sequence[Any], name: str) -> Numbers:
    """Return a field of all rows, float64[rows]."""
    return np.fromiter(map(attrgetter(name), rows), np.float64, len(rows))


def _reasons(run: Run) -> dict[str, int]:
    # Reasons that differ in a number alone are merged.
    counts = Counter(_NUMBER.sub("N", each.reason) for each in run.outcomes if each.reason)
    in_order = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    rest = sum(count for _, count in in_order[_MOST_REASONS:])
    return dict(in_order[:_MOST_REASONS]) | ({"other reasons": rest} if rest else {})


def _there(values: Numbers) -> Numbers:
    return values[~np.isnan(values)]


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _mean(values: Numbers) -> float:
    return math.fsum(values) / len(values)


def _figures(values: Numbers) -> LatencyFigures:
    p50, p90, p95, p99 = percentiles(values, PERCENTILES)
    return LatencyFigures(len(values), _mean(values), p50, p90=p90, p95=p95, p99=p99, max=float(values.max()))


def _kept(slo: Slo, columns: _Columns, good: npt.NDArray[np.bool_], seconds: float) -> SloFigures:
    count = len(good)
    attainment = int(np.count_nonzero(good)) / count if count else None
    checks = []
    for each in slo.objectives:
        if not each.statistic:
            continue
        found = np.where(columns.completed, columns.latencies[each.measure], math.inf)
        there = _there(found)
        if not len(there):
            value = 0.0
        elif each.percentile is None:
            value = _mean(there)
        else:
            value = percentiles(there, [each.percentile])[0]
        checks.append(ObjectiveCheck(each.name, each.limit, value if value < math.inf else None, value <= each.limit))
    if slo.attainment is not None:
        held = attainment is None or attainment >= slo.attainment
        checks.append(ObjectiveCheck("attainment", slo.attainment, attainment, held=held))
    return SloFigures(
        slo=str(slo),
        good=int(np.count_nonzero(good)),
        attainment=attainment,
        goodput=_rate(int(np.count_nonzero(good)), seconds),
        checks=tuple(checks),
        held=all(check.held for check in checks),
    )


def _tenants(
    run: Run, columns: _Columns, good: npt.NDArray[np.bool_] | None
) -> tuple[float | None, float | None, tuple[TenantFigures, ...]]:
    """Return Jain's index of service and of speed, and the figures of tenants."""
    numbers: dict[str, int] = {}
    of_request = np.fromiter(
        (numbers.setdefault(each.tenant, len(numbers)) for each in run.outcomes), np.int64, len(run.outcomes)
    )
    if len(numbers) < 2:
        return None, None, ()

    def summed(values: npt.NDArray[Any]) -> Numbers:
        return np.bincount(of_request, values, len(numbers)).astype(np.float64)

    # The prompt of a request without a token was not served.
    tokens = summed(columns.output + np.where(np.isnan(columns.first), 0, columns.prompt))
    under_way = summed(columns.latencies["e2e"])
    speed = np.divide(tokens, under_way, out=np.zeros_like(tokens), where=under_way > 0)
    requests, output, completed = np.bincount(of_request), summed(columns.output), summed(columns.completed)
    attained = None if good is None else summed(good) / requests
    names = list(numbers)
    most = sorted(range(len(names)), key=lambda number: (-int(requests[number]), names[number]))[:_MOST_TENANTS]

    def figures(number: int) -> TenantFigures:
        ttft = _there(columns.latencies["ttft"][(of_request == number) & columns.completed])
        return TenantFigures(
            tenant=names[number],
            requests=int(requests[number]),
            completed=int(completed[number]),
            output_tokens=int(output[number]),
            ttft_p99=percentiles(ttft, [99.0])[0] if len(ttft) else None,
            attainment=None if attained is None else float(attained[number]),
        )

    return jain(tokens), jain(speed), tuple(map(figures, most))


def _waits(run: Run, columns: _Columns) -> tuple[dict[str, float], tuple[WaitFigures, ...]]:
    """Return the waits of all requests, summed by reason, and the breakdown of their time."""
    table = np.frombuffer(run.waits, np.float32).reshape(-1, 2, len(WAITS))
    if not len(table):
        return {}, ()
    done = columns.completed

    def slowest(part: int) -> Numbers:
        """Return a hundredth of the completed requests, and those that took as long as the quickest of them."""
        own: Numbers = table[done, part].astype(np.float64)
        took = own.sum(1)
        last = len(took) - -(-len(took) // 100)
        return own[took >= np.partition(took, last)[last]] if len(took) else own

    late, slow = slowest(0), slowest(1)
    sums, found = {}, []
    for number, reason in enumerate(WAITS):
        own = table[:, :, number]
        if not own.any():
            continue
        if reason != "computing":
            sums[reason] = math.fsum(own[own > 0].tolist())
        parts = (own[done, 0], late[:, number], own[done, 1], slow[:, number], own[~done].sum(1, dtype=np.float64))
        found.append(WaitFigures(reason, *(_mean(part) if len(part) else 0.0 for part in parts)))
    found.sort(key=lambda each: (-each.before - each.between - each.lost, each.reason))
    return dict(sorted(sums.items())), tuple(found)


def _absent(run: Run, columns: _Columns) -> Numbers:
    """Return float64[2, workers]: seconds without a process, and with one that loads an engine, within the run."""
    found = np.zeros((2, len(run.workers)))
    first, last = float(columns.arrived.min(initial=math.inf)), float(columns.ended.max(initial=0.0))
    for each in run.absences:
        found[int(each.restarts), each.worker] += max(0.0, min(each.end, last) - max(each.begin, first))
    return found


class _WorkerUse:
    """Means over time of the samples of workers: each holds until the next of its worker, the last to the end."""

    def __init__(self, run: Run, last: float, absent: Numbers) -> None:
        names = ("at", "worker", "waiting", "running", "used_blocks")
        at, worker, waiting, running, used = (column(run.samples, name) for name in names)
        order = np.lexsort((at, worker))
        at, waiting, running, used = at[order], waiting[order], running[order], used[order]
        number = worker[order].astype(np.int64)
        end = max(last, float(at.max(initial=0.0)))
        is_last = np.append(number[1:] != number[:-1], True)[: len(number)]
        self._held = np.where(is_last, end, np.append(at[1:], end)[: len(at)]) - at
        self._number, self._workers = number, len(run.workers)
        blocks = np.array(run.blocks, np.float64)[number] if len(number) else np.zeros(0)
        share = np.divide(used, blocks, out=np.zeros_like(used), where=blocks > 0)
        self._span = end - float(at.min(initial=end))
        self._running, self._waiting, self._kv = map(self._over_time, (running, waiting, share))
        self._peaks = np.zeros(self._workers)
        np.maximum.at(self._peaks, number, share)
        self._seen = np.bincount(number, minlength=self._workers) > 0
        time = np.maximum(self._over_time(np.ones_like(at)) - absent, 0.0)
        self.kv_use = math.fsum(self._kv) / math.fsum(time) if time.any() else None
        self.kv_peak = float(self._peaks.max()) if len(at) else None
        self.running, self.waiting = (_rate(math.fsum(each), self._span) for each in (self._running, self._waiting))
        self._kv = np.divide(self._kv, time, out=np.zeros_like(time), where=time > 0)

    def _over_time(self, values: Numbers) -> Numbers:
        return np.bincount(self._number, values * self._held, self._workers).astype(np.float64)

    def figures(self, run: Run, columns: _Columns, absent: Numbers) -> tuple[WorkerFigures, ...]:
        answered = columns.worker >= 0
        of_request = columns.worker[answered]
        requests = np.bincount(of_request, minlength=self._workers)
        output = np.bincount(of_request, columns.output[answered], self._workers)
        return tuple(
            WorkerFigures(
                worker=name,
                requests=int(requests[index]),
                output_tokens=int(output[index]),
                running=_rate(float(self._running[index]), self._span),
                waiting=_rate(float(self._waiting[index]), self._span),
                kv_use=float(self._kv[index]) if self._seen[index] else None,
                kv_peak=float(self._peaks[index]) if self._seen[index] else None,
                away=float(absent[0, index]),
                restarting=float(absent[1, index]),
            )
            for index, name in enumerate(run.workers)
        )
