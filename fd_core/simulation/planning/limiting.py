"""Margin of a run to an SLO, and its bottleneck: decided from the run's own figures, by short rules."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from fd_core.simulation.clock.waits import WAIT_TITLES
from fd_core.simulation.costs.profile import CostProfile, curve_function
from fd_core.simulation.planning.shapes import DeploymentShape
from fd_core.simulation.results.report import ReportedRun
from fd_core.simulation.results.slo import parse_slo
from fd_core.simulation.results.summary import ObjectiveCheck, RunSummary
from fd_core.simulation.results.tables import duration_text

_NEVER: Final = -1e9
"""Margin of a limit that too many requests never reached."""
_MOST: Final = 0.5
_GROUPS: Final = {"preempted": "blocks"} | dict.fromkeys(
    ("budget", "scheduler", "prefix", "step", "engine"), "computing"
)
"""Reasons of time that mean the same for a plan: waiting for a step is waiting for the compute of devices."""


class LimitFound(msgspec.Struct, frozen=True):
    """The resource that a run lacks."""

    what: str
    words: str
    """A sentence with the supporting figures."""


def check_margin(check: ObjectiveCheck) -> float:
    """Return the remaining share of a limit, or of the requests that may miss an attainment; below 0 if violated."""
    if check.value is None:
        return 0.0 if check.held else _NEVER
    if check.name == "attainment":
        return 1 - (1 - check.value) / (1 - check.limit) if check.limit < 1 else check.value - 1
    return 1 - check.value / check.limit


def slo_margin(run: ReportedRun) -> float:
    """Return the least margin of a run."""
    checks = run.summary.slo.checks if run.summary.slo else ()
    return min(map(check_margin, checks), default=0.0)


def check_text(check: ObjectiveCheck) -> str:
    """Return a figure and its limit as text."""
    if check.name == "attainment":
        return f"attainment {check.value or 0:.1%}, limit {check.limit:.1%}"
    return f"{check.name} {duration_text(check.value)}, limit {duration_text(check.limit)}"


def limit_of(run: ReportedRun, shape: DeploymentShape, profile: CostProfile, when: str) -> LimitFound:
    """Return the bottleneck of a run that violates its SLO, or would do so first. `when`: at which load or size."""
    summary = run.summary
    worst = min(summary.slo.checks if summary.slo else (), key=check_margin)
    seen = _Seen(run, shape, profile)
    what, more = _lost(summary, worst) or _decided(seen, *_measured(summary, worst))
    waited = math.fsum(each.before for each in summary.waits if each.reason != "computing")
    limits = "What limits is" if check_margin(worst) < 0 else "What would limit first is"
    words = (
        f"{limits} {what}: {when}, {check_text(worst)}; {more}, devices busy {seen.busy:.0%} of the time, up to "
        f"{seen.rows:.0f} of {shape.max_num_seqs} slots and {seen.kv_peak:.0%} of KV blocks of a worker in use, "
        f"{duration_text(waited)} of waiting before a first token."
    )
    return LimitFound(what, words)


class _Seen:
    """Inputs of the rules."""

    def __init__(self, run: ReportedRun, shape: DeploymentShape, profile: CostProfile) -> None:
        summary, step, bins = run.summary, profile.step, run.bins
        workers = summary.workers
        self.summary, self.shape = summary, shape
        device_seconds = summary.counters.get("device_busy_seconds", 0.0)
        self.busy = device_seconds / max(len(workers) * summary.seconds, 1e-9)
        self.kv_peak = summary.kv_peak or 0.0
        # Prefill workers hold a request for a moment only. A row is a worker, or the mean of some where there are many.
        rows = [] if bins is None else zip(bins.rows, bins.row_running, strict=True)
        self.rows = max((max(means) for name, means in rows if not name.startswith("prefill")), default=0.0)
        counts = [each.requests for each in workers if not each.worker.startswith("prefill")]
        mean = sum(counts) / max(len(counts), 1)
        fullest = max(counts, default=0)
        # By chance a worker has up to three standard deviations more than the others.
        self.uneven = fullest / mean if mean and fullest >= mean + 3.0 * math.sqrt(mean) else 1.0
        self.before = {each.reason: each.before_slowest for each in summary.waits}
        self.between = {each.reason: each.between_slowest for each in summary.waits}
        by_tokens, by_rows = curve_function(step.by_tokens), curve_function(step.by_sampled_rows)
        together = max(self.rows, 1.0)
        completed = max(summary.completed, 1)
        self.weights = step.constant + by_tokens(together) + by_rows(together)
        context = (summary.prompt_tokens + summary.output_tokens / 2) / completed
        self.keys = together * context * step.per_context_token
        self.step = self.weights + self.keys
        budget = float(shape.max_num_batched_tokens)
        new = summary.prompt_tokens - summary.cached_tokens
        prefill = new * (step.constant + by_tokens(budget)) / budget
        prefill += completed * (new / completed) ** 2 / 2 * step.per_query_key
        self.prefill_share = min(prefill / device_seconds, 1.0) if device_seconds else 1.0
        self.hand_over = profile.transfer.seconds(summary.prompt_tokens / completed * profile.model.kv_bytes_per_token)

    def stalls(self, measure: str, seconds: float | None) -> bool:
        """Return True if most of the time of a token is not spent in steps that only decode."""
        return measure == "tpot" and seconds is not None and self.step < _MOST * seconds


def _lost(summary: RunSummary, worst: ObjectiveCheck) -> tuple[str, str] | None:
    """Return the explanation if the limit is violated because requests were rejected or failed; None if not."""
    lost = summary.refused + summary.failed
    missed = worst.value is None
    if worst.name == "attainment":
        missed = lost > (1 - worst.limit) * summary.requests
    if not missed or lost < summary.left:
        return None
    why = next(iter(summary.reasons), "no reason was reported")
    if summary.refused >= summary.failed:
        return "refused requests", f"{summary.refused:,} requests were refused, most since {why}"
    return "failed requests", f"{summary.failed:,} requests failed, most since {why}"


def _measured(summary: RunSummary, worst: ObjectiveCheck) -> tuple[str, float | None]:
    """Return the latency that a limit is about, `ttft` or `tpot`, and its seconds if the limit is one of it."""
    measure, found = worst.name.split("_")[0], summary.latencies
    value = worst.value
    if measure == "attainment":
        limits = parse_slo(summary.slo.slo).request_limits() if summary.slo else {}
        # Take the limit that most requests exceed or approach, at the percentile that the attainment allows.
        share = next((name for name in ("p50", "p90", "p95", "p99") if float(name[1:]) >= 100 * worst.limit), "max")
        shares = {name: getattr(found[name], share) / limit for name, limit in limits.items() if name in found}
        measure = max(shares, key=shares.__getitem__, default="ttft")
        value = getattr(found[measure], share) if measure in found else None
    if measure == "e2e":
        decodes = "ttft" in found and "tpot" in found and found["ttft"].mean < found["e2e"].mean / 2
        return ("tpot", found["tpot"].mean) if decodes else ("ttft", None)
    return ("ttft", None) if measure == "ttft" else ("tpot", value)


def _decided(seen: _Seen, measure: str, seconds: float | None) -> tuple[str, str]:
    """Return the bottleneck of first or further tokens, by the first rule that applies, and its evidence."""
    spent = seen.before if measure == "ttft" else seen.between
    groups: dict[str, float] = {}
    for reason, took in spent.items():
        group = _GROUPS.get(reason, reason)
        groups[group] = groups.get(group, 0.0) + took
    most = max(groups, key=groups.__getitem__, default="computing")
    slowest = f"the slowest hundredth of requests spends {duration_text(groups.get(most))} there"
    if seen.uneven > 1.5:
        return "the router", f"the fullest worker has {seen.uneven:.1f} times the mean"
    if most == "blocks":
        return "KV blocks", f"{slowest}, {seen.summary.preemptions:,} preemptions"
    if most == "slot" and measure == "ttft":
        return "slots", slowest
    if most in ("slot", "transfer") or (most == "computing" and seen.stalls(measure, seconds) and seen.shape.prefill):
        handed = f"the KV of a prompt takes {duration_text(seen.hand_over)} to a decode worker"
        return "handing KV over", f"{handed}, a step there {duration_text(seen.step)}"
    if most != "computing":
        return WAIT_TITLES[most], slowest
    if measure == "ttft" and (seen.shape.prefill or seen.prefill_share >= _MOST):
        return "compute of prefill", f"{seen.summary.prompt_tokens_per_s:,.0f} prompt tokens a second"
    if measure == "ttft":
        return "decodes with prefill", f"prefill is {seen.prefill_share:.0%} of what devices compute"
    if seen.stalls(measure, seconds):
        return "prefill between decodes", f"a step that only decodes takes {duration_text(seen.step)}"
    what = "reading KV in decode" if seen.keys > seen.weights else "reading weights in decode"
    return what, f"a step reads weights for {duration_text(seen.weights)} and KV for {duration_text(seen.keys)}"
