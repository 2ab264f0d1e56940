"""The output side: turns a step's answer into tokens for requests, acknowledgements and ends.

Pure, as the scheduler is. The law it keeps: outputs apply only if epoch, step and gen match; a draining request
leaves only on the -9 of its own gen; an error in one row never swallows another.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fd_core import signals
from fd_core.engine.messages import Delta
from fd_core.engine.output_counters import OutputCounters
from fd_core.scheduling.requests import Request
from fd_core.scheduling.scheduler import Scheduler
from fd_core.signals import Outcome
from fd_core.types import FinishReason, IntArray, LogprobRows, StepOutput, StepPlan, TokenLogprobs

__all__ = ["Outputs"]


class Outputs:
    """Applies outputs to the scheduler's slots, in step order."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._next_step = 0
        self._told_cached: set[str] = set()
        self.counters = OutputCounters()

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Delta]:
        """Apply the answer to `plan` and return what the clients are told, at most one delta for each request.

        Raises `fd_core.signals.MalformedOutput` if the backend broke the protocol.
        """
        if (output.epoch, output.step) != (plan.epoch, plan.step) or plan.step != self._next_step:
            self.counters.stale_outputs += 1
            return []
        self._next_step = plan.step + 1
        outcomes = signals.read(output.tokens, output.errors)
        rows = self._rows_of_this_stay(plan, output)
        deltas = self._deliver(plan, rows, outcomes, output)
        if output.drafts_ready is not None:
            self._scheduler.drafts_are_ready(output.drafts_ready, plan.step)
        self._scheduler.answered(plan.step)
        deltas += self._acknowledge(plan, outcomes, output)
        return deltas

    def abort_waiting(self, request_id: str) -> list[Delta]:
        """Abort a request; returns its last delta if it ended at once."""
        if self._scheduler.abort(request_id):
            return [self._end(request_id, FinishReason.ABORT)]
        return []

    # Inside -----------------------------------------------------------------------------------------------

    def _rows_of_this_stay(self, plan: StepPlan, output: StepOutput) -> npt.NDArray[np.intp]:
        """Return indices of the plan's rows whose stay still exists on both sides."""
        table = self._scheduler.slots
        same_runner = output.gens[plan.slots] == plan.gens
        occupied = (table.running[plan.slots] | table.draining[plan.slots]) & ~table.ended[plan.slots]
        same_here = (table.gen[plan.slots] == plan.gens) & occupied
        self.counters.stale_outputs += int((~same_runner).sum())
        self.counters.overrun_rows += int((same_runner & ~same_here).sum())
        return np.flatnonzero(same_runner & same_here)

    def _deliver(
        self, plan: StepPlan, rows: npt.NDArray[np.intp], outcomes: signals.Outcomes, output: StepOutput
    ) -> list[Delta]:
        slots = plan.slots[rows].astype(np.intp)
        kinds = outcomes.kinds[slots]
        deltas = [self._fail(slot, message) for slot, message in output.errors if slot in set(slots.tolist())]
        healthy = kinds != Outcome.ERROR
        rows, slots = rows[healthy], slots[healthy]
        counts = outcomes.counts[slots]
        with_tokens = (counts > 0) & plan.samples[rows]
        unasked = (counts > 0) & ~plan.samples[rows]
        if unasked.any():
            raise signals.MalformedOutput(f"slot {slots[unasked][0]} carries tokens that no row of the step samples")
        told, ended = self._append(slots[with_tokens], counts[with_tokens], outcomes.tokens, output.logprobs)
        # First what is settled, then who is done: the blocks that a last step completes are named like any other.
        self._settle(plan, rows, slots, counts)
        for slot, reason in ended:
            self._finish(slot, _occupant(self._scheduler.slots.requests, slot), reason)
        return deltas + told

    def _append(
        self, slots: npt.NDArray[np.intp], counts: IntArray, tokens: IntArray, logprobs: LogprobRows | None
    ) -> tuple[list[Delta], list[tuple[int, FinishReason]]]:
        """Append delivered tokens, at most up to a stop token or the length limit; return also the slots that end."""
        table = self._scheduler.slots
        width = int(counts.max(initial=0))
        if width == 0:
            return [], []
        block = tokens[slots, :width]
        columns = np.arange(width, dtype=np.int32)
        counts = np.minimum(counts, table.limit[slots] - table.known[slots])
        stops = (block[:, :, None] == table.stops[slots][:, None, :]).any(axis=2) & (columns < counts[:, None])
        stopped = stops.any(axis=1)
        counts = np.where(stopped, stops.argmax(axis=1).astype(np.int32) + 1, counts)
        for column in range(width):
            live = slots[column < counts]
            table.tokens[live, table.known[live]] = block[column < counts, column]
            table.known[live] += 1
        self.counters.generated_tokens += int(counts.sum())
        full = table.known[slots] >= table.limit[slots]
        scores = _logprobs_by_slot(logprobs, table.requests)
        deltas: list[Delta] = []
        ended: list[tuple[int, FinishReason]] = []
        for index, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            request = _occupant(table.requests, slot)
            reason = None
            if stopped[index]:
                reason = FinishReason.STOP
            elif full[index]:
                reason = FinishReason.LENGTH
            given = scores.get(slot)
            deltas.append(
                self._delta(request, tuple(block[index, :count].tolist()), reason, given[:count] if given else None)
            )
            if reason is not None:
                ended.append((slot, reason))
        return deltas, ended

    def _settle(
        self, plan: StepPlan, rows: npt.NDArray[np.intp], slots: npt.NDArray[np.intp], counts: IntArray
    ) -> None:
        """Positions computed by the step are settled, but for rejected drafts; requests that left have none."""
        table, drafts = self._scheduler.slots, self._scheduler.drafts
        sampled = plan.samples[rows]
        accepted = np.maximum(counts - 1, 0)
        if drafts is not None:
            drafts.observe(slots[sampled], plan.num_drafts[rows][sampled], accepted[sampled])
            self._scheduler.set_back(slots, np.where(sampled, plan.num_drafts[rows] - accepted, 0))
        still = table.running[slots]
        rows, slots, sampled = rows[still], slots[still], sampled[still]
        if len(rows):
            # The last token delivered is known but not computed yet.
            upto = np.where(sampled, table.known[slots] - 1, plan.starts[rows] + plan.num_tokens[rows])
            self._scheduler.settle(slots, upto.astype(np.int32))

    def _acknowledge(self, plan: StepPlan, outcomes: signals.Outcomes, output: StepOutput) -> list[Delta]:
        """Match every -9 with the one take-back it answers."""
        table = self._scheduler.slots
        expected = {back.slot: back.gen for back in plan.revocations}
        seen = set(np.flatnonzero(outcomes.kinds == Outcome.RELEASED).tolist())
        if seen != set(expected):
            raise signals.MalformedOutput(
                f"step {plan.step} takes back slots {sorted(expected)}, but its output releases {sorted(seen)}"
            )
        deltas = []
        for slot, gen in expected.items():
            if output.gens[slot] != gen or table.gen[slot] != gen:
                self.counters.stale_outputs += 1
                continue
            ended_before = _occupant(table.requests, slot).ended is not None
            request = self._scheduler.released(slot)
            if request.ended is not None and not ended_before:
                deltas.append(self._end(request.spec.request_id, request.ended))
        return deltas

    def _fail(self, slot: int, message: str) -> Delta:
        request = _occupant(self._scheduler.slots.requests, slot)
        delta = Delta(request.spec.request_id, finish_reason=FinishReason.ERROR, error=message)
        self._finish(slot, request, FinishReason.ERROR)
        return delta

    def _finish(self, slot: int, request: Request, reason: FinishReason) -> None:
        self._scheduler.finish(slot, reason)
        self._count_end(request.spec.request_id, reason)

    def _delta(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
        logprobs: tuple[TokenLogprobs, ...] | None,
    ) -> Delta:
        request_id = request.spec.request_id
        cached = prefill = None
        if request_id not in self._told_cached:
            self._told_cached.add(request_id)
            cached, prefill = request.cached_tokens, request.prefill
        return Delta(request_id, token_ids, reason, logprobs, cached, prefill=prefill)

    def _end(self, request_id: str, reason: FinishReason) -> Delta:
        self._count_end(request_id, reason)
        return Delta(request_id, finish_reason=reason)

    def _count_end(self, request_id: str, reason: FinishReason) -> None:
        self._told_cached.discard(request_id)
        self.counters.finished[reason] += 1


def _occupant(requests: list[Request | None], slot: int) -> Request:
    request = requests[slot]
    if request is None:
        raise RuntimeError(f"slot {slot} is empty")
    return request


def _logprobs_by_slot(rows: LogprobRows | None, requests: list[Request | None]) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Group rows by slot in column order; each request gets as many alternatives as it asked for."""
    if rows is None:
        return {}
    grouped: dict[int, list[TokenLogprobs]] = {}
    for index in np.lexsort((rows.columns, rows.slots)).tolist():
        slot = int(rows.slots[index])
        request = requests[slot]
        wanted = request.spec.params.logprobs if request is not None else None
        if wanted is None:
            continue
        grouped.setdefault(slot, []).append(
            TokenLogprobs(
                float(rows.chosen[index]),
                tuple(rows.top_ids[index, :wanted].tolist()),
                tuple(rows.top[index, :wanted].tolist()),
            )
        )
    return {slot: tuple(values) for slot, values in grouped.items()}
