"""What spans of this server say of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fd_core.http.spans import RequestSpan, RequestSpans, span_name
from fd_core.server.preprocess.jobs import Job
from fd_core.types import PHASE_NAMES, PrefillTrace

if TYPE_CHECKING:
    from fd_core.server.stream.generation import ChoiceStream


_FAILED = frozenset({"error", "disconnect"})


def begin_generation(spans: RequestSpans, job: Job, seconds_ago: float) -> RequestSpan:
    """Begin the span of a generation that arrived `seconds_ago`."""
    name, attributes = span_name(job.source.path, job.shown.model)
    params = job.params[0]
    asked: dict[str, Any] = {
        **attributes,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": len(job.prompts) * job.n,
        "gen_ai.request.id": job.source.request_id,
    }
    return spans.begin(name, "server", job.source.trace, asked, seconds_ago=seconds_ago)


def end_generation(span: RequestSpan, job: Job, choices: Sequence[ChoiceStream], outcome: str) -> None:
    """End the span of a generation whose choices have ended, or that ended with `outcome` without any."""
    ended = [choice.finished or outcome for choice in choices] or [outcome]
    told: dict[str, Any] = {
        "gen_ai.response.model": job.shown.model,
        "gen_ai.response.finish_reasons": ended,
        "gen_ai.usage.input_tokens": sum(map(len, job.prompts)),
        "gen_ai.usage.output_tokens": sum(choice.tokens for choice in choices),
        **{f"gen_ai.latency.{name}": seconds for name, seconds in _latencies(choices).items()},
        **{f"fdcore.phase.{name}": seconds for name, seconds in _phases(choices).items()},
    }
    span.end(told, error=next((each for each in ended if each in _FAILED), None))


def _latencies(choices: Sequence[ChoiceStream]) -> dict[str, float]:
    """Return seconds of the first choice: until a slot was free, and until the first token, where there was one."""
    told: dict[str, float] = {}
    for choice in choices[:1]:
        if choice.deltas.admitted is not None:
            told["time_in_queue"] = choice.deltas.admitted - choice.deltas.submitted
        if choice.tokens:
            told["time_to_first_token"] = choice.times.first - choice.times.arrived
    return told


def _phases(choices: Sequence[ChoiceStream]) -> dict[str, float]:
    """Return where the time of the first choice went in the engine, seconds, as far as it is known."""
    told = zip(PHASE_NAMES, choices[0].phases if choices else (), strict=False)
    return {name: seconds for name, seconds in told if seconds}


def prefill_span(spans: RequestSpans, model: str, trace: PrefillTrace) -> None:
    """Make the span of a prompt that this worker computed for a decode worker, below that worker's span."""
    attributes: Mapping[str, Any] = {
        "gen_ai.operation.name": "prefill",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": trace.num_tokens,
        "fdcore.lease.end": trace.end,
    }
    carried = {"traceparent": trace.traceparent}
    span = spans.begin(f"prefill {model}", "server", carried, attributes, seconds_ago=trace.seconds)
    span.end(error=None if trace.end == "confirmed" else trace.end)
