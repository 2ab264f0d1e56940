"""Lower bounds for every deployment: from a workload's tokens and a profile's terms, without any simulation.

A request alone on its worker is as fast as possible; a worker whose steps are all as full as possible has the highest
throughput. Both omit all other overheads, so plans that they exclude cannot meet an SLO, while those that they do not
exclude may still fail.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from fd_core.simulation.costs.profile import CostCurve, CostProfile, curve_function
from fd_core.simulation.results.slo import Objective, Slo
from fd_core.simulation.results.summary import Numbers, percentiles
from fd_core.simulation.workloads.workload import Workload

_MOST_REQUESTS: Final = 100_000
"""Requests that are considered; the rest of a longer workload is ignored."""


class Demand(msgspec.Struct, frozen=True):
    """Demand of the clients. Entries belong to requests, in the order of conversations."""

    new_tokens: Numbers
    """Prompt tokens that no earlier request had: the others may hit a cache."""
    prompt_tokens: Numbers
    output_tokens: Numbers
    """0 where a client may disconnect before."""
    first_turn: Numbers
    """1 for the first request of a conversation, whose time is known, 0 for the others."""
    span: float
    """Seconds from the first conversation to the last."""

    @property
    def rate(self) -> float | None:
        """Requests per second; None if all arrive at once."""
        return len(self.new_tokens) / self.span if self.span > 0 else None


def demand_of(workload: Workload) -> Demand:
    """Return the demand of a workload; of its first 100,000 requests, if there are more."""
    seen: set[int] = set()
    rows: list[tuple[float, float, float, float]] = []
    begin: float | None = None
    at = 0.0
    for conversation in workload:
        at = conversation.at
        begin = at if begin is None else begin
        prefix = length = 0
        for number, turn in enumerate(itertools.islice(conversation.turns, _MOST_REQUESTS - len(rows))):
            prefix, length = (0, 0) if turn.fresh else (prefix, length)
            new = 0
            for piece in turn.adds:
                length += piece.tokens
                prefix = hash((prefix, piece.seed, piece.tokens))
                new += 0 if prefix in seen else piece.tokens
                seen.add(prefix)
            asked = math.inf if turn.max_tokens is None else turn.max_tokens
            answer = min(asked, turn.answer.tokens)
            rows.append((new, length, 0 if turn.patience is not None else answer, number == 0))
            length += 0 if turn.patience is not None else int(answer)
            prefix = hash((prefix, turn.answer.seed, turn.answer.tokens))
        if len(rows) >= _MOST_REQUESTS:
            break
    new_tokens, prompts, output, first = np.array(rows, np.float64).reshape(-1, 4).T
    return Demand(new_tokens, prompts, output, first_turn=first, span=at - (begin or 0.0))


def least_possible(
    each: Objective, profile: CostProfile, demand: Demand, budget: int, attainment: float, longest: float = math.inf
) -> float:
    """Return the least value of a limit for requests that are alone on their workers; seconds.

    `budget`: tokens of a step. `attainment`: the share that a limit of each request is for. `longest`: limit of
    the tokens of prompt and answer together; longer requests are rejected, which is later than any limit.
    """
    step = profile.step
    one = curve_function(step.by_tokens)(1.0) + curve_function(step.by_sampled_rows)(1.0) + step.constant + step.per_row
    first = np.array([_prefill_alone(profile, tokens, budget) for tokens in demand.new_tokens])
    values = {
        "ttft": first,
        "tpot": np.full(len(first), one),
        "gap": np.full(len(first), one),
        "e2e": first + np.maximum(demand.output_tokens - 1, 0) * one,
    }[each.measure]
    refused = demand.prompt_tokens >= longest
    if each.measure in ("tpot", "gap"):
        # An answer of one token has neither.
        values, refused = values[refused | (demand.output_tokens >= 2)], refused[refused | (demand.output_tokens >= 2)]
    values[refused] = math.inf
    if not len(values):
        return 0.0
    if each.statistic == "mean":
        return math.fsum(values) / len(values)
    share = each.percentile if each.percentile is not None else 100 * attainment
    return percentiles(values, [share])[0]


def fewest_workers(
    profile: CostProfile, demand: Demand, slo: Slo, max_num_seqs: int, budget: int
) -> tuple[int, int, int]:
    """Return lower bounds for the numbers of mixed, prefill and decode workers, each at least 1."""
    limits: dict[str, float] = {}
    shares = []
    for each in slo.objectives:
        if each.statistic != "mean":
            limits[each.measure] = min(each.limit, limits.get(each.measure, math.inf))
            shares.append((slo.attainment or 0.0) if each.percentile is None else each.percentile / 100)
    # Each limit may be missed by some requests; all limits together by the sum of these numbers.
    share = max(1 - math.fsum(1 - share for share in shares), 0.0)
    ttft = min(limits.get("ttft", math.inf), limits.get("e2e", math.inf))
    tpot = min(limits.get("tpot", math.inf), limits.get("gap", math.inf))
    if not math.isfinite(ttft) or not len(demand.new_tokens):
        return 1, 1, 1
    late = math.ceil((1 - share) * len(demand.new_tokens)) + 1  # a percentile is interpolated between two values
    first = demand.first_turn > 0
    step = profile.step
    token = _least_share(curve_function(step.by_tokens), step.by_tokens, budget, constant=step.constant)
    row = _least_share(curve_function(step.by_tokens), step.by_tokens, max_num_seqs, constant=step.constant)
    sampled = _least_share(curve_function(step.by_sampled_rows), step.by_sampled_rows, max_num_seqs, constant=0.0)
    new = demand.new_tokens[first]
    prefill = new * token + new * (new + 1) / 2 * step.per_query_key
    steps = np.maximum(demand.output_tokens[first] - 1, 0)
    reading = steps * step.per_context_token * new
    by = demand.span + ttft
    done = by + float(steps.max(initial=0.0)) * tpot
    alone = _workers(prefill, late, by)
    if not math.isfinite(done):
        return alone, alone, 1
    both = _workers(prefill + steps * (token + sampled) + reading, late, done)
    return max(alone, both), alone, _workers(steps * (row + sampled) + reading, late, done)


def _workers(work: Numbers, late: int, seconds: float) -> int:
    """Return the workers that complete all but the `late` longest pieces of work within `seconds`."""
    needed = math.fsum(np.sort(work)[: max(len(work) - late, 0)])
    return max(math.ceil(needed / seconds - 1e-9), 1) if seconds > 0 else 1


def _least_share(look_up: Callable[[float], float], curve: CostCurve, most: int, constant: float) -> float:
    """Return the least time per token of steps of up to `most` tokens: in a full step, or at a corner of its curve."""
    counts = [float(most), *(count for count in curve.counts if 1 <= count < most)]
    return min((constant + look_up(count)) / count for count in counts)


def _prefill_alone(profile: CostProfile, tokens: float, budget: int) -> float:
    """Return the time of a prompt's first token on an idle worker; the network is left out."""
    step, request = profile.step, profile.request
    full, rest = divmod(max(tokens, 1.0), budget)
    by_tokens = curve_function(step.by_tokens)
    chunks = full * (step.constant + by_tokens(budget)) + (step.constant + by_tokens(rest) if rest else 0.0)
    pairs = tokens * (tokens + 1) / 2 * step.per_query_key
    sampled = curve_function(step.by_sampled_rows)(1.0)
    return request.receive + chunks + pairs + sampled + request.delivery
