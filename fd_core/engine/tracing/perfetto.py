"""Conversion of a trace to Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

Three processes hold the tracks. *Steps*: a slice for each step, and counters. *Slots*: a track for each slot, with
occupancies by request, and in them the work of the steps; arrows lead from a preemption to the return. *KV outside
the device*: loads and saves, which overlap, as asynchronous slices. Times are microseconds from the start of the trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any, Final

import msgspec
import numpy as np

from fd_core.engine.tracing.format import total
from fd_core.engine.tracing.reader import KINDS, OccupancySpan, Position, TraceContents, kinds_of_cells

_STEPS, _SLOTS, _KV = 1, 2, 3
"""Ids of the processes. A slot's thread id is the number of the slot plus 1."""
_SHOWN_KINDS: Final = frozenset(KINDS) - {"idle", "unscheduled"}


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One event, with the field names of the Chrome trace-event format."""

    ph: str
    """Phase: X complete, i instant, C counter, b and e asynchronous, s and f flow, M metadata."""
    name: str
    pid: int
    tid: int | None = None
    ts: int | None = None
    """Microseconds."""
    dur: int | None = None
    """Microseconds; of complete events only."""
    cat: str | None = None
    id: int | None = None
    """Joins the two events of an asynchronous slice, or of a flow, of one category."""
    s: str | None = None
    """Scope of an instant: `t`, its thread."""
    bp: str | None = None
    """`e` binds the end of a flow to the slice around it."""
    args: dict[str, Any] | None = None


def perfetto_json(trace: TraceContents) -> bytes:
    """Return the trace as JSON of the Chrome trace-event format."""
    return msgspec.json.encode(
        {
            "displayTimeUnit": "ms",
            "otherData": {"engines": trace.headers, "problems": trace.problems},
            "traceEvents": perfetto_events(trace),
        }
    )


def perfetto_events(trace: TraceContents) -> list[TraceEvent]:
    """Return the events in order of time, an outer slice before those in it; metadata first."""
    clock = _Clock(trace)
    events = [*_steps(trace, clock), *_slots(trace, clock), *_operations(trace, clock)]
    events.sort(key=lambda event: (event.ts or 0, -(event.dur or 0)))
    return [*_names(trace), *events]


class _Clock:
    """Times of a trace in microseconds from its start, over all its epochs."""

    def __init__(self, trace: TraceContents) -> None:
        self._offsets = trace.offsets()
        self.began = [self.at(position, position.line.began) for position in trace.positions]
        self.ended = [self.at(position, position.line.ended) for position in trace.positions]

    def at(self, position: Position, time: int) -> int:
        return self._offsets[position.epoch] + time


def _names(trace: TraceContents) -> Iterator[TraceEvent]:
    header = trace.headers[-1]
    for pid, name in (
        (_STEPS, f"steps: {header.model} on {header.backend}"),
        (_SLOTS, "slots"),
        (_KV, "KV outside the device"),
    ):
        yield TraceEvent(ph="M", name="process_name", pid=pid, args={"name": name})
        yield TraceEvent(ph="M", name="process_sort_index", pid=pid, args={"sort_index": pid})
    yield TraceEvent(ph="M", name="thread_name", pid=_STEPS, tid=1, args={"name": "steps"})
    for slot in range(trace.num_slots):
        yield TraceEvent(ph="M", name="thread_name", pid=_SLOTS, tid=slot + 1, args={"name": f"slot {slot}"})
        yield TraceEvent(ph="M", name="thread_sort_index", pid=_SLOTS, tid=slot + 1, args={"sort_index": slot})


def _slice(pid: int, tid: int, name: str, cat: str, begin: int, end: int, args: dict[str, Any]) -> TraceEvent:
    return TraceEvent(ph="X", name=name, pid=pid, tid=tid, ts=begin, dur=max(end - begin, 0), cat=cat, args=args)


def _steps(trace: TraceContents, clock: _Clock) -> Iterator[TraceEvent]:
    for index, position in enumerate(trace.positions):
        line, began, ended = position.line, clock.began[index], clock.ended[index]
        prefill, drafts = sum(tokens for _, tokens in line.chunks), total(line.drafted)
        tokens = {"prefill": prefill, "decode": line.budget - prefill - drafts, "drafts": drafts}
        figures = {
            "budget used": line.budget,
            "budget": trace.headers[position.epoch].limits.max_num_batched_tokens,
            **tokens,
            "drafts accepted": total(line.accepted) - total(line.forced),
            "forced tokens": total(line.forced),
            "tokens delivered": line.delivered,
            "steps missing before": position.missing,
        }
        yield _slice(_STEPS, 1, f"step {line.step}", cat="step", begin=began, end=ended, args=figures)
        owned, fenced, cached = line.kv
        for name, values in (
            ("tokens per step", tokens),
            ("waiting requests", {"waiting": line.waiting}),
            ("KV blocks", {"owned": owned, "fenced": fenced, "cached": cached}),
        ):
            yield TraceEvent(ph="C", name=name, pid=_STEPS, ts=ended, args=values)


def _slots(trace: TraceContents, clock: _Clock) -> Iterator[TraceEvent]:
    preempted: dict[str, OccupancySpan] = {}
    returns = 0
    for occupancy in sorted(trace.occupancies, key=lambda span: span.start):
        first, last = max(occupancy.start - trace.first, 0), occupancy.end - trace.first
        begin, end, track = clock.began[first], clock.ended[last], occupancy.slot + 1
        about = {
            "gen": occupancy.gen,
            "tokens at admission": occupancy.tokens,
            "of them with KV": occupancy.computed,
            "returned after a preemption": occupancy.returned,
            "ended by": occupancy.exit,
            "steps": last - first + 1,
        }
        yield _slice(_SLOTS, track, occupancy.request_id, cat="residency", begin=begin, end=end, args=about)
        if occupancy.exit not in ("open", "unknown", "engine ended"):
            name = "preempted" if occupancy.exit == "preempted" else f"finished: {occupancy.exit}"
            args = {"request": occupancy.request_id}
            yield TraceEvent(ph="i", name=name, pid=_SLOTS, tid=track, ts=end, s="t", cat="end", args=args)
        before = preempted.pop(occupancy.request_id, None)
        if before is not None:
            returns += 1
            left = max(before.end - trace.first, 0)
            for ph, tid, time, bp in (("s", before.slot + 1, clock.began[left], None), ("f", track, begin, "e")):
                yield TraceEvent(ph=ph, name="return", pid=_SLOTS, tid=tid, ts=time, cat="return", id=returns, bp=bp)
        if occupancy.exit == "preempted":
            preempted[occupancy.request_id] = occupancy
    yield from _cells(trace, clock)


def _cells(trace: TraceContents, clock: _Clock) -> Iterator[TraceEvent]:
    """Yield the work of steps per slot: one slice for each prefill chunk, and for all neighbouring steps of a kind."""
    kinds = kinds_of_cells(trace)
    if not kinds.size:
        return
    positions = list(trace.positions)
    breaks = np.zeros((trace.num_slots, len(positions) + 1), np.bool_)
    breaks[:, 0] = breaks[:, -1] = True
    breaks[:, 1:-1] = (kinds[:, 1:] != kinds[:, :-1]) | (kinds[:, 1:] == KINDS.index("prefill"))
    for index, position in enumerate(positions):
        if position.missing or (index and position.epoch != positions[index - 1].epoch):
            breaks[:, index] = True
    for occupancy in trace.occupancies:
        breaks[occupancy.slot, max(occupancy.start - trace.first, 0)] = True
        breaks[occupancy.slot, occupancy.end - trace.first + 1] = True
    chunks = [dict(position.line.chunks) for position in positions]
    for slot in range(trace.num_slots):
        bounds = np.flatnonzero(breaks[slot]).tolist()
        for first, after in pairwise(bounds):
            kind = KINDS[kinds[slot, first]]
            if kind not in _SHOWN_KINDS:
                continue
            figures: dict[str, Any] = {"steps": after - first}
            if kind == "prefill":
                figures = {"tokens": chunks[first].get(slot, 0)}
            name = kind
            if kind == "loading":  # a load ends in one of these steps, or in the next one
                loads = chain.from_iterable(position.line.loads for position in positions[first : after + 1])
                name = next((f"loading {load.request_id}" for load in loads if load.slot == slot), kind)
            yield _slice(_SLOTS, slot + 1, name, "slot", clock.began[first], clock.ended[after - 1], figures)


def _operations(trace: TraceContents, clock: _Clock) -> Iterator[TraceEvent]:
    number = 0
    for position in trace.positions:
        operations: list[tuple[str, str, int, int, dict[str, Any]]] = []
        for load in position.line.loads:
            figures = {"slot": load.slot, "blocks": load.blocks, "loaded": load.loaded, "from the host": load.from_host}
            operations.append((f"load {load.request_id}", "load", load.began, load.ended, figures))
        for save in position.line.saves:
            operations.append(("save", "save", save.began, save.ended, {"blocks": save.blocks, "saved": save.saved}))
        for name, cat, began, ended, figures in operations:
            number += 1
            for ph, time, args in (("b", began, figures), ("e", ended, None)):
                at = clock.at(position, time)
                yield TraceEvent(ph=ph, name=name, pid=_KV, tid=1, ts=at, cat=cat, id=number, args=args)
