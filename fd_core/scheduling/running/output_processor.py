"""Output processing: turns the output of a step into tokens of requests, acknowledgements and ends.

Invariants: outputs apply only if epoch, step and gen match; a draining request leaves only on the -9 of its gen; an
error in one row never affects another row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core import signals
from fd_core.kv.blocks import BlockPool
from fd_core.scheduling.phases import PhaseClock
from fd_core.scheduling.requests import Request
from fd_core.scheduling.running.drafts import DraftControl
from fd_core.scheduling.running.running_batch import RunningBatch, slot_of
from fd_core.scheduling.running.slots import SlotTable
from fd_core.signals import Outcome
from fd_core.types import Delta, FinishReason, IntArray, LogprobRows, StepOutput, StepPlan, TokenLogprobs
from fd_core.types.metrics import counter

_RELEASED: Final = np.uint8(Outcome.RELEASED)
_ALL: Final = slice(None)
"""Every row of a plan: an index that copies nothing."""
_Rows = npt.NDArray[np.intp] | slice


class OutputCounters(msgspec.Struct, kw_only=True):
    """Outputs delivered and dropped since the start; monotonic."""

    generated_tokens: Annotated[
        int, counter("generated_tokens", "Tokens generated and delivered.", vllm=("generation_tokens",))
    ] = 0
    stale_outputs: Annotated[
        int, counter("stale_outputs", "Outputs dropped because epoch, step or generation did not match.")
    ] = 0
    overrun_rows: int = 0
    """Rows computed for a request that had ended by the time its output arrived."""
    finished: Annotated[
        dict[FinishReason, int],
        counter("engine_finished", "Requests that the engine ended, by finish reason.", label="reason"),
    ] = msgspec.field(default_factory=lambda: dict.fromkeys(FinishReason, 0))


@dataclass
class OutputProcessor:
    """Applies outputs to the slots of one scheduler, in step order."""

    _slots: SlotTable
    _pool: BlockPool
    _drafts: DraftControl
    _running_batch: RunningBatch
    _times: PhaseClock
    _on_released: Callable[[Request], None]
    """Called with each request whose slot was released and that did not end."""
    counters: OutputCounters = field(default_factory=OutputCounters)
    _next_step: int = 0

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Delta]:
        """Apply the output of `plan`; return at most one delta per request. Raises `signals.MalformedOutput`."""
        if (output.epoch, output.step) != (plan.epoch, plan.step) or plan.step != self._next_step:
            self.counters.stale_outputs += 1
            return []
        self._next_step = plan.step + 1
        outcomes = signals.read(output.tokens, output.errors)
        deltas: list[Delta] = []
        slots = self._slots
        # Indexing with arrays of another integer type is several times slower.
        indices = plan.slots.astype(np.intp)
        # Rows whose slot still runs the same request on both sides.
        same_runner = output.gens[indices] == plan.gens
        current = same_runner & (slots.delivering_gen[indices] == plan.gens)
        rows: _Rows = _ALL
        if (num_current := int(np.count_nonzero(current))) < len(indices):
            stale = len(indices) - int(np.count_nonzero(same_runner))
            self.counters.stale_outputs += stale
            self.counters.overrun_rows += len(indices) - stale - num_current
            rows = current.nonzero()[0]
            indices = indices[rows]
        if output.errors:
            rows = np.arange(len(plan.slots))[rows]
            healthy = outcomes.kinds[indices] != Outcome.ERROR
            failed = set(indices[~healthy].tolist())
            deltas = [self._fail(slot, message) for slot, message in output.errors if slot in failed]
            rows, indices = rows[healthy], indices[healthy]
        counts, samples = outcomes.counts[indices], plan.samples[rows]
        delivers = counts > 0
        if np.count_nonzero(unasked := delivers > samples):
            raise signals.MalformedOutput(f"slot {indices[unasked][0]} carries tokens that no row of the step samples")
        if output.prompt_logprobs is not None or output.pooled is not None:
            self._collect(output, indices)
        all_deliver = np.count_nonzero(delivers) == len(indices)
        asked, given = (indices, counts) if all_deliver else (indices[delivers], counts[delivers])
        delivered, ended = self._append(asked, given, outcomes.tokens, logprobs=output.logprobs)
        self._pool.answered(plan.step)
        # Settle blocks before ending requests: the blocks that a last step completes are registered like any others.
        self._settle(plan, rows, indices, counts=counts, all_deliver=all_deliver)
        for slot, request, reason in ended:
            self._running_batch.finish(slot, request, reason)
        deltas += delivered
        if output.drafts_ready is not None:
            # Slots that were scheduled again since this step hold newer drafts; those of an earlier gen hold none.
            current = (slots.last_step <= plan.step) & (slots.gen == output.gens)
            slots.hold_drafts(current.nonzero()[0], output.drafts_ready[current])
        if plan.revocations or outcomes.any_released:
            deltas += self._acknowledge(plan, outcomes, output)
        return deltas

    def end(self, request: Request, reason: FinishReason) -> Delta:
        """Return the last delta of a request that ended with nothing left to deliver."""
        return self._delta(request, (), reason, logprobs=None)

    def _append(
        self, rows: npt.NDArray[np.intp], counts: IntArray, tokens: IntArray, logprobs: LogprobRows | None
    ) -> tuple[list[Delta], list[tuple[int, Request, FinishReason]]]:
        """Append delivered tokens, at most up to a stop token or the length limit; return also the slots that end."""
        slots = self._slots
        if not len(rows):
            return [], []
        width = 1 if tokens.shape[1] == 1 else int(counts.max())
        block = tokens[rows] if width == tokens.shape[1] else tokens[rows, :width]
        room = slots.limit[rows] - slots.num_tokens[rows]
        if width == slots.stops.shape[1] == 1:  # the common case; reductions take most of the time
            stopped = block[:, 0] == slots.stops[:, 0][rows]  # a two-dimensional index takes twice as long
        else:
            counts = np.minimum(counts, room)
            in_row = np.arange(width, dtype=np.int32) < counts[:, None]
            stops = (block[:, :, None] == slots.stops[rows][:, None, :]).any(axis=2) & in_row
            stopped = stops.any(axis=1)
            counts = np.where(stopped, stops.argmax(axis=1).astype(np.int32) + 1, counts)
        slots.append_tokens(rows, block, counts)
        given_out = counts.tolist()
        self.counters.generated_tokens += sum(given_out)
        full = counts >= room
        scores = {} if logprobs is None else _logprobs_by_slot(logprobs, slots.requests)
        ended: list[tuple[int, Request, FinishReason]] = []
        ends = stopped | full
        # Tuples straight from memory: a list for each row would be tracked by the garbage collector.
        if width == 1:
            cells = [*zip(block[:, 0].tolist(), strict=False)]
        else:
            cells = [*struct.iter_unpack(f"{width}i", np.ascontiguousarray(block, np.int32).data)]
        indices = rows.tolist()
        names = [slots.names[slot] for slot in indices]
        # Most rows continue and deliver only tokens; the deltas of the others are replaced below.
        deltas = [*map(Delta, names, cells)]
        if logprobs is None and (width == 1 or min(given_out) == width):
            rest = (ends | slots.awaits_first[rows]).nonzero()[0].tolist()
        else:
            rest = [*range(len(names))]
        for index in rest:
            slot, count, delivered = indices[index], given_out[index], cells[index]
            request = slots.request_in(slot)
            token_ids = delivered if count == width else delivered[:count]
            reason = None
            if ends[index]:
                reason = FinishReason.STOP if stopped[index] else FinishReason.LENGTH
                ended.append((slot, request, reason))
            given = scores.get(slot)
            deltas[index] = self._delta(request, token_ids, reason, logprobs=given[:count] if given else None)
        return deltas, ended

    def _collect(self, output: StepOutput, rows: npt.NDArray[np.intp]) -> None:
        """Store log-probabilities and vectors of the prompts in slots `rows` until the first token is delivered."""
        if (scores := output.prompt_logprobs) is not None:
            for slot in set(scores.slots.tolist()).intersection(rows.tolist()):
                collected = self._slots.request_in(slot).prompt_logprobs
                if collected is not None:
                    collected.take(scores, np.flatnonzero(scores.slots == slot).astype(np.int32))
        if (pooled := output.pooled) is not None:
            columns = pooled.slots.tolist(), pooled.starts.tolist(), pooled.counts.tolist()
            for slot, start, count, value in zip(*columns, pooled.values, strict=True):
                state = self._slots.request_in(slot).pooled if slot in rows else None
                if state is not None:
                    state.take(start, count, value)

    def _settle(
        self, plan: StepPlan, rows: _Rows, rows_of: npt.NDArray[np.intp], counts: IntArray, all_deliver: bool
    ) -> None:
        """Settle the positions computed by the step, except rejected drafts; requests that left have none."""
        slots = self._slots
        sampled = plan.samples[rows]
        if self._drafts.possible and (self._drafts.learning or np.count_nonzero(plan.num_drafts)):
            drafted = plan.num_drafts[rows]
            accepted = np.maximum(counts - 1, 0)
            self._drafts.observe(rows_of[sampled], drafted[sampled], accepted[sampled])
            rejected = np.where(sampled, drafted - accepted, 0)
            # Rejected drafts and their KV do not exist.
            slots.rollback_drafts(rows_of, rejected)
        if slots.num_draining:
            still = slots.running[rows_of]
            rows = np.arange(len(plan.slots))[rows][still]
            rows_of, sampled = rows_of[still], sampled[still]
        if len(rows_of):
            upto = plan.starts[rows] + plan.num_tokens[rows]
            if self._drafts.possible or not all_deliver:
                # The last token delivered has no KV yet.
                upto = np.where(sampled, slots.num_tokens[rows_of] - 1, upto).astype(np.int32)
            self._running_batch.settle(rows_of, upto, plan.step)

    def _acknowledge(self, plan: StepPlan, outcomes: signals.Outcomes, output: StepOutput) -> list[Delta]:
        """Match every -9 with the preemption or abort that it acknowledges."""
        slots = self._slots
        expected = {revoked.slot: revoked.gen for revoked in plan.revocations}
        seen = set((outcomes.kinds == _RELEASED).nonzero()[0].tolist())
        if seen != set(expected):
            raise signals.MalformedOutput(
                f"step {plan.step} stops slots {sorted(expected)}, but its output acknowledges {sorted(seen)}"
            )
        deltas = []
        for slot, gen in expected.items():
            if output.gens[slot] != gen or slots.gen[slot] != gen:
                self.counters.stale_outputs += 1
                continue
            ended_before = slots.request_in(slot).ended is not None
            request = self._running_batch.release(slot)
            if request.ended is None:
                self._on_released(request)
            elif not ended_before:
                deltas.append(self.end(request, request.ended))
        return deltas

    def _fail(self, slot: int, message: str) -> Delta:
        request = self._slots.request_in(slot)
        self._running_batch.finish(slot, request, FinishReason.ERROR)
        return msgspec.structs.replace(self.end(request, FinishReason.ERROR), error=message)

    def _delta(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
        logprobs: tuple[TokenLogprobs, ...] | None,
    ) -> Delta:
        request_id = request.spec.request_id
        cached = prefill = scores = pooled = phases = None
        if token_ids and not request.delivered_first:
            self._slots.deliver_first(slot_of(request))
            cached, prefill = request.cached_tokens, request.prefill
            phases = None if reason else self._times.durations(request.times)
        if token_ids and request.prompt_logprobs is not None:
            scores, request.prompt_logprobs = request.prompt_logprobs.delivered(), None
        if token_ids and request.pooled is not None:
            pooled = request.pooled.delivered()
        if reason is not None:
            self.counters.finished[reason] += 1
            phases = self._times.durations(request.times)
        return Delta(
            request_id=request_id,
            token_ids=token_ids,
            finish_reason=reason,
            logprobs=logprobs,
            cached_tokens=cached,
            prefill=prefill,
            prompt_logprobs=scores,
            pooled=pooled,
            phases=phases,
        )


def _logprobs_by_slot(rows: LogprobRows, requests: list[Request | None]) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Group rows by slot in column order; each request gets as many alternatives as it requested."""
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
