"""From single runs to the figures of the table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

AGREEMENT_TOKENS = 16

LEAST_AGREEMENT = 0.25
"""Below this an engine computes another model: its speed is not compared."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One finished request: its tokens, and seconds from the moment when the whole workload was sent."""

    token_ids: tuple[int, ...]
    ttft_s: float
    end_s: float

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each output token after the first; None for a single token."""
        after_first = len(self.token_ids) - 1
        return (self.end_s - self.ttft_s) / after_first if after_first > 0 else None


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One engine on one workload in one round."""

    engine: str
    workload: str
    round: int
    wall_s: float
    requests: tuple[RequestResult, ...]
    counters: Mapping[str, int] = field(default_factory=dict)
    """Counters of the engine during the run, where its adapter has any."""

    @property
    def output_tps(self) -> float:
        """Output tokens for each second of the run, prefill included."""
        return sum(len(r.token_ids) for r in self.requests) / self.wall_s

    @property
    def ttft_s(self) -> float:
        """Median time to first token of the run's requests."""
        return median(r.ttft_s for r in self.requests)

    @property
    def tpot_s(self) -> float:
        """Median time for each further token of the run's requests; nan where requests return one token."""
        each = [r.tpot_s for r in self.requests if r.tpot_s is not None]
        return median(each) if each else float("nan")


@dataclass(frozen=True, slots=True)
class Summary:
    """An engine on a workload over all rounds; `ratio` is to the reference engine, None where it did not run."""

    engine: str
    workload: str
    rounds: int
    output_tps: float
    output_tps_range: tuple[float, float]
    ttft_s: float
    tpot_s: float
    ratio: float | None
    floor_share: float | None
    agreement: float | None


def wrong_counts(run: PeerRun, asked: Sequence[int]) -> list[str]:
    """Return the requests of a run that did not return exactly the tokens `asked`; an empty list: the run counts."""
    problems = []
    if len(run.requests) != len(asked):
        problems.append(f"{len(run.requests)} of {len(asked)} requests were answered")
    lengths = [(len(r.token_ids), count) for r, count in zip(run.requests, asked, strict=False)]
    for got, count in sorted({(got, count) for got, count in lengths if got != count}):
        problems.append(f"requests returned {got} tokens instead of {count}")
    return problems


def agreement(one: PeerRun, other: PeerRun, tokens: int = AGREEMENT_TOKENS) -> float:
    """Return the share of the first `tokens` greedy tokens that two runs have in common before they part."""
    common = total = 0
    for a, b in zip(one.requests, other.requests, strict=True):
        length = min(tokens, len(a.token_ids), len(b.token_ids))
        total += length
        for x, y in zip(a.token_ids[:length], b.token_ids[:length], strict=True):
            if x != y:
                break
            common += 1
    return common / total if total else float("nan")


def paired_ratio(runs: Iterable[PeerRun], reference: Iterable[PeerRun]) -> float | None:
    """Return the median over rounds of engine / reference output tokens/s; only rounds that both finished count.

    Ratios inside a round cancel the drift of the machine between rounds.
    """
    base = {r.round: r.output_tps for r in reference}
    ratios = [r.output_tps / base[r.round] for r in runs if r.round in base]
    return median(ratios) if ratios else None


def summarise(
    runs: Sequence[PeerRun], *, reference: str, judge: Sequence[str] = (), floor_s: float | None = None
) -> list[Summary]:
    """Summarise runs into one row for each (workload, engine), in order of first appearance.

    `reference` is the engine that ratios are taken to. `judge` lists engines whose tokens are trusted, best first:
    agreement is with the first of them (other than the engine itself) that ran the same round; an engine that agrees
    in less than LEAST_AGREEMENT of all its tokens gets no ratios. `floor_s` is the least time of a decode step: the
    weights' bytes over the memory bandwidth.
    """
    groups: dict[tuple[str, str], list[PeerRun]] = {}
    for run in runs:
        groups.setdefault((run.workload, run.engine), []).append(run)
    differing = {
        engine
        for engine in {r.engine for r in runs}
        if (share := _pooled_agreement(engine, judge, groups)) is not None and share < LEAST_AGREEMENT
    }
    order = {w: i for i, w in enumerate(dict.fromkeys(r.workload for r in runs))}
    rows = []
    for (workload, engine), mine in sorted(groups.items(), key=lambda item: order[item[0][0]]):
        tps = [r.output_tps for r in mine]
        tpot = median(r.tpot_s for r in mine)
        rows.append(
            Summary(
                engine=engine,
                workload=workload,
                rounds=len(mine),
                output_tps=median(tps),
                output_tps_range=(min(tps), max(tps)),
                ttft_s=median(r.ttft_s for r in mine),
                tpot_s=tpot,
                ratio=None if engine in differing else paired_ratio(mine, groups.get((workload, reference), [])),
                floor_share=floor_s / tpot if floor_s is not None and tpot > 0 else None,
                agreement=_agreement_with_judge(mine, workload, judge, groups),
            )
        )
    return rows


def _pooled_agreement(
    engine: str, judge: Sequence[str], groups: Mapping[tuple[str, str], Sequence[PeerRun]]
) -> float | None:
    """Return the engine's agreement over all workloads, each weighted by its requests."""
    shares = []
    for (workload, name), mine in groups.items():
        if name == engine and (share := _agreement_with_judge(mine, workload, judge, groups)) is not None:
            shares.append((share, sum(len(r.requests) for r in mine)))
    total = sum(weight for _, weight in shares)
    return sum(share * weight for share, weight in shares) / total if total else None


def _agreement_with_judge(
    mine: Sequence[PeerRun],
    workload: str,
    judge: Sequence[str],
    groups: Mapping[tuple[str, str], Sequence[PeerRun]],
) -> float | None:
    for trusted in judge:
        theirs = {r.round: r for r in groups.get((workload, trusted), ())}
        shares = [agreement(r, theirs[r.round]) for r in mine if r.round in theirs]
        if trusted != mine[0].engine and shares:
            return median(shares)
    return None
