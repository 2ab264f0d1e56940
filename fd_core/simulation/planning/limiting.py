"""How near a run is to an SLO, and what holds it back: decided from the run's own figures, by rules that are short."""

from __future__ import annotations

from typing import Final

import msgspec

from fd_core.simulation.costs.profile import CostProfile
from fd_core.simulation.costs.profile_costs import curve_function
from fd_core.simulation.planning.shapes import DeploymentShape
from fd_core.simulation.results.report import ReportedRun
from fd_core.simulation.results.summary import ObjectiveCheck
from fd_core.simulation.results.tables import duration_text

__all__ = ["LimitFound", "check_margin", "check_text", "limit_of", "slo_margin"]

_NEVER: Final = -1e9
"""Margin of a limit that too many requests never came to."""
_FULL: Final = 0.95
_UNEVEN: Final = 1.5


class LimitFound(msgspec.Struct, frozen=True):
    """What a run would need more of."""

    what: str
    words: str
    """A sentence with the figures that it rests on."""


def check_margin(check: ObjectiveCheck) -> float:
    """Return how far a figure is from its limit, as a share of it; below 0 it breaks the limit."""
    if check.value is None:
        return _NEVER
    share = check.value / check.limit
    return share - 1 if check.name == "attainment" else 1 - share


def slo_margin(run: ReportedRun) -> float:
    """Return the least margin of a run."""
    checks = run.summary.slo.checks if run.summary.slo else ()
    return min(map(check_margin, checks), default=0.0)


def check_text(check: ObjectiveCheck) -> str:
    """Return a figure beside its limit."""
    if check.name == "attainment":
        return f"attainment {check.value or 0:.1%}, limit {check.limit:.1%}"
    return f"{check.name} {duration_text(check.value)}, limit {duration_text(check.limit)}"


def limit_of(run: ReportedRun, shape: DeploymentShape, profile: CostProfile, when: str) -> LimitFound:
    """Return what limits a run that breaks its SLO, or would break it first. `when` says at which load or size."""
    summary, bins = run.summary, run.bins
    checks = summary.slo.checks if summary.slo else ()
    worst = min(checks, key=check_margin)
    measure = worst.name.split("_")[0]
    workers = summary.workers
    busy = summary.counters.get("device_busy_seconds", 0.0) / max(len(workers) * summary.seconds, 1e-9)
    decoding = [each for each in range(len(workers)) if not workers[each].worker.startswith("prefill")]
    rows = 0.0
    if bins is not None and len(bins.rows) == len(workers):
        rows = max(max(bins.row_running[each]) for each in decoding)
    waited = sum(each.before for each in summary.waits if each.reason != "computing")
    kv_peak = summary.kv_peak or 0.0
    tokens = [float(workers[each].output_tokens) for each in decoding]
    uneven = max(tokens) * len(tokens) / max(sum(tokens), 1.0)
    completed = max(summary.completed, 1)
    context = (summary.prompt_tokens + summary.output_tokens / 2) / completed
    step = profile.step
    weights = step.constant + curve_function(step.by_tokens)(max(rows, 1.0))
    weights += curve_function(step.by_sampled_rows)(max(rows, 1.0))
    keys = max(rows, 1.0) * context * step.per_context_token
    if summary.refused:
        what, more = "the queue", f"{summary.refused:,} requests were refused"
    elif kv_peak >= _FULL and (summary.preemptions or summary.waiting >= 1):
        what, more = "KV blocks", f"{summary.preemptions:,} preemptions, {summary.waiting:.1f} requests waiting"
    elif rows >= _FULL * shape.max_num_seqs:
        what, more = "slots", f"{summary.waiting:.1f} requests waiting"
    elif uneven > _UNEVEN and summary.requests >= 20 * len(workers):
        what, more = "the router", f"the fullest worker has {uneven:.1f} times the mean"
    elif measure in ("tpot", "gap") and weights + keys < worst.limit / 2:
        what = "prefill between decodes" if not shape.prefill else "decode's bursts"
        more = f"a step that only decodes takes {duration_text(weights + keys)}"
    elif measure in ("tpot", "gap"):
        what = "reading KV in decode" if keys > weights else "reading weights in decode"
        more = f"a step reads weights for {duration_text(weights)} and KV for {duration_text(keys)}"
    else:
        what, more = "compute of prefill", f"{summary.prompt_tokens_per_s:,.0f} prompt tokens a second"
    words = (
        f"What limits is {what}: {when}, {check_text(worst)}; {more}, devices busy {busy:.0%} of the time, up to "
        f"{rows:.0f} of {shape.max_num_seqs} slots and {kv_peak:.0%} of KV blocks of a worker in use, "
        f"{duration_text(waited)} of waiting before a first token."
    )
    return LimitFound(what, words)
