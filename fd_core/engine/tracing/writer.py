"""The trace: events of each step, as JSON lines that `fdcore trace` renders as a page.

    engine's loop                      writer's thread                     file
    step_ended(...) --> bounded queue --> line of the step as JSON --> header, steps, closing line

The loop enqueues frozen values and continues: it does no I/O and takes no lock. If the queue is full, steps are dropped
and counted; the next step that is written records how many are missing and which request holds which slot.

A trace holds request ids, numbers of tokens and times, never prompts or tokens. Gauges are those right after the step's
commit; with two steps in flight they include the plan of the following step. After a restart of the engine the trace
continues in the same file after a header with the next epoch. A file that has reached its limit gets a final
`LimitLine`; later steps are counted and dropped, so that a long run cannot fill the disk.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core import signals
from fd_core.config.sizes import format_size
from fd_core.effects.operations import Cancel, Completion, Effects, Fetch, Fetched, Load, Loaded, Save, Saved
from fd_core.engine.tracing import format as lines
from fd_core.errors import ConfigError
from fd_core.scheduling.contract import SchedulerHoldings
from fd_core.types import Delta, RequestSpec, StepOutput, StepPlan

_log = logging.getLogger(__name__)
_MAGIC: Final = b'{"fdcore_trace":'
_MAX_QUEUED: Final = 4096
"""Capacity of the writer's queue, in steps; more are dropped."""
_WRITE_SECONDS: Final = 0.05
"""Sleep of the writer when its queue is empty; it flushes the file before."""
_LAST_BYTES: Final = 256
"""Space reserved for `LimitLine` and `ClosingLine`."""
_LETTER_CODES: Final = np.frombuffer(lines.COUNT_LETTERS.encode(), np.uint8)


class KVTrace:
    """Tracks effects from their beginning to their completion. Used from the engine's thread."""

    def __init__(self, now: Callable[[], int]) -> None:
        """`now` returns the time in the unit of lines."""
        self.entries: list[lines.KVEntry] = []
        self.loading: dict[int, int] = {}
        """Slots that wait for their KV, by operation; without those of aborted requests."""
        self._now = now
        self._open: dict[int, tuple[int, Load | Fetch | Save]] = {}
        """Operations in flight, with the time at which each began."""

    def began(self, effects: Effects) -> None:
        """Record the decisions, the operations that begin, and the requests that wait for them."""
        for decision in effects.decisions:
            self.entries.append(
                lines.DecisionEntry(
                    self._now(),
                    decision.request_id,
                    decision.load,
                    host_blocks=decision.host_blocks,
                    store_blocks=decision.store_blocks,
                    tokens=decision.num_tokens,
                    load_time=_microseconds(decision.load_seconds),
                    compute_time=_microseconds(decision.recompute_seconds),
                )
            )
        for effect in effects.operations:
            match effect:
                case Load(operation) | Fetch(operation):
                    self._open[operation] = self._now(), effect
                    self.loading[operation] = effect.slot
                case Save(operation):
                    self._open[operation] = self._now(), effect
                case Cancel(operation):
                    self.loading.pop(operation, None)

    def ended(self, completion: Completion) -> None:
        """Record how an operation ended."""
        if not isinstance(completion, Loaded | Fetched | Saved) or completion.operation not in self._open:
            return
        began, effect = self._open.pop(completion.operation)
        self.loading.pop(completion.operation, None)
        done, from_host, blocks = 0, 0, len(effect.blocks)
        match completion:
            case Loaded(_, done, from_host) | Saved(_, done, from_host):
                pass
            case Fetched(_, "transferred"):
                done = blocks
        done = min(done, blocks)
        if isinstance(effect, Save):
            self.entries.append(lines.SaveEntry(began, self._now(), blocks, saved=done))
        else:
            self.entries.append(
                lines.LoadEntry(began, self._now(), effect.slot, effect.request_id, blocks, done, from_host)
            )


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)


class StepRecord(msgspec.Struct, frozen=True, gc=False):
    """A committed step as the engine's loop hands it to the writer: immutable values."""

    began: int
    ended: int
    plan: StepPlan
    output: StepOutput
    deltas: tuple[Delta, ...]
    held: SchedulerHoldings
    dropped: int = 0
    occupants: tuple[lines.OccupancyEntry, ...] = ()
    loading: tuple[int, ...] = ()
    kv_entries: tuple[lines.KVEntry, ...] = ()
    arrived: tuple[lines.ArrivalEntry, ...] = ()
    answered: tuple[int | None, ...] = ()
    """Of each delta: total tokens of its request, if it is the last delta; empty if none is."""


def line_of(record: StepRecord) -> lines.StepLine:
    """Return the line for `record`, without tokens."""
    plan, output = record.plan, record.output
    letters = np.full(len(output.gens), ord(lines.IDLE), np.uint8)
    letters[list(record.loading)] = ord(lines.LOADING)
    prefills = ~plan.samples | (plan.num_tokens - plan.num_drafts > 1)
    letters[plan.slots] = np.where(prefills, ord(lines.PREFILL), ord(lines.DECODE))
    for revocation in plan.revocations:
        letters[revocation.slot] = ord(lines.DRAINING)
    chunked = plan.slots[prefills]
    drafted = accepted = forced = ""
    if plan.num_drafts.any():
        drafts, kept = np.zeros((2, len(letters)), np.int32)
        drafts[plan.slots] = plan.num_drafts
        counts = signals.read(output.tokens, output.errors).counts
        answered = plan.samples & (output.gens[plan.slots] == plan.gens)
        kept[plan.slots] = np.where(answered, np.maximum(counts[plan.slots] - 1, 0), 0)
        drafted, accepted = _text(_LETTER_CODES[drafts], "0"), _text(_LETTER_CODES[kept], "0")
        if output.forced is not None:
            forced = _text(_LETTER_CODES[np.minimum(output.forced, kept)], "0")
    return lines.StepLine(
        step=plan.step,
        began=record.began,
        ended=record.ended,
        budget=plan.total_tokens,
        delivered=sum(len(delta.token_ids) for delta in record.deltas),
        waiting=record.held.waiting,
        kv=(record.held.owned, record.held.fenced, record.held.cached),
        slots=_text(letters, lines.IDLE),
        drafted=drafted,
        accepted=accepted,
        forced=forced,
        chunks=tuple(zip(chunked.tolist(), plan.num_tokens[prefills].tolist(), strict=True)),
        arrived=record.arrived,
        admitted=tuple(
            lines.AdmissionEntry(entry.slot, entry.gen, entry.request_id, len(entry.token_ids), entry.computed)
            for entry in plan.admissions
        ),
        revoked=tuple((revocation.slot, revocation.gen) for revocation in plan.revocations),
        finished=tuple(
            lines.FinishEntry(
                delta.request_id,
                delta.finish_reason,
                tokens,
                None if delta.phases is None else tuple(round(1e6 * seconds) for seconds in delta.phases),
            )
            for delta, tokens in itertools.zip_longest(record.deltas, record.answered)
            if delta.finish_reason is not None
        ),
        decisions=tuple(entry for entry in record.kv_entries if isinstance(entry, lines.DecisionEntry)),
        loads=tuple(entry for entry in record.kv_entries if isinstance(entry, lines.LoadEntry)),
        saves=tuple(entry for entry in record.kv_entries if isinstance(entry, lines.SaveEntry)),
        dropped=record.dropped,
        occupants=record.occupants,
    )


def require_trace_file(path: Path) -> None:
    """Raise `ConfigError` unless a trace can be written to `path` without destroying anything but a trace."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a file", field="--trace")
        with path.open("ab"):
            pass
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot write {path}: {reason}", field="--trace") from error
    if head and head != _MAGIC:
        raise ConfigError(
            f"{path} exists and is not a trace", field="--trace", hint="choose another file or remove this one"
        )


class TraceWriter:
    """Writes one epoch of a trace from a separate thread.

    An epoch above 1 is appended. The file stays within `limit` bytes, unless its first header alone is larger. If it
    cannot be written any more, tracing ends with a warning and the engine continues. Raises `ConfigError` if it cannot
    be opened.
    """

    def __init__(
        self,
        path: Path,
        header: lines.TraceHeader,
        limit: int,
        nanoseconds: Callable[[], int] = time.monotonic_ns,
        *,
        complete: bool = False,
    ) -> None:
        """`nanoseconds` is the clock that the other calls use; time 0 of the lines is now.

        `complete`: wait for the writer instead of dropping steps; for engines that run faster than real time.
        """
        origin = nanoseconds()
        self._path = path
        self._limit = limit
        self._complete = complete
        self._origin = self._began = origin
        self._queue: deque[StepRecord] = deque()
        self._dropped = 0
        self.kv = KVTrace(lambda: self._clock(nanoseconds()))
        """Receives events of KV outside the device; the line of the next step contains what it collects."""
        self._occupants: dict[int, lines.OccupancyEntry] = {}
        self._arrived: list[lines.ArrivalEntry] = []
        self._got: dict[str, int] = {}
        """Tokens delivered so far to running and waiting requests."""
        self._closed: lines.ClosingLine | None = None
        self._ending = threading.Event()
        self._failed = self._full = False
        self._left_out = 0
        """Steps that were in the queue when the file was full; used by the writer's thread only."""
        self._encoder = msgspec.json.Encoder()
        require_trace_file(path)
        try:
            self._file: IO[bytes] = path.open("wb" if header.epoch == 1 else "ab")
            self._written = self._file.tell()
            # An engine that was killed may have left half a line.
            first = (b"\n" if self._written else b"") + self._encoder.encode(header)
            self._begun = not self._written or self._has_room(len(first))
            if self._begun:
                self._write(first)
                self._file.flush()
            else:
                self._full = True
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"cannot write {path}: {reason}", field="--trace") from error
        self._thread = threading.Thread(target=self._run, name="fdcore-trace", daemon=True)
        self._thread.start()
        # The last steps before a crash are the most useful ones of a trace.
        atexit.register(self._end)

    def turn_began(self, now: int) -> None:
        """Record the time, in nanoseconds, at which the turn began that commits the next step."""
        self._began = now

    def request_arrived(self, now: int, spec: RequestSpec) -> None:
        """Record a request, and the tokens that it got in earlier epochs."""
        if not self._failed and not self._full:
            self._arrived.append(lines.ArrivalEntry(spec.request_id, self._clock(now), len(spec.prompt)))
            self._got[spec.request_id] = len(spec.delivered)

    def requests_ended(self, deltas: Iterable[Delta]) -> None:
        """Forget requests that ended outside steps."""
        for delta in deltas:
            self._got.pop(delta.request_id, None)

    def step_ended(
        self, now: int, plan: StepPlan, output: StepOutput, deltas: list[Delta], held: SchedulerHoldings
    ) -> None:
        """Enqueue a committed step with the state after it, or count it as dropped if the queue is full."""
        answered = self._follow(plan, deltas)
        while self._complete and len(self._queue) >= _MAX_QUEUED and not self._failed:
            time.sleep(_WRITE_SECONDS)
        if len(self._queue) >= _MAX_QUEUED or self._failed or self._full:
            self._dropped += 1
            self.kv.entries.clear()
            if self._failed or self._full:
                self._arrived.clear()
            return
        self._queue.append(
            StepRecord(
                self._clock(self._began),
                self._clock(now),
                plan,
                output=output,
                deltas=tuple(deltas),
                held=held,
                dropped=self._dropped,
                occupants=tuple(self._occupants.values()) if self._dropped else (),
                loading=tuple(self.kv.loading.values()),
                kv_entries=tuple(self.kv.entries),
                arrived=tuple(self._arrived),
                answered=answered,
            )
        )
        self.kv.entries.clear()
        self._arrived.clear()
        self._dropped = 0

    def close(self, now: int) -> None:
        """Write the queued steps and the closing line; idempotent."""
        if self._closed is None:
            self._closed = lines.ClosingLine(closed=self._clock(now), dropped=self._dropped)
        self._end()

    def _clock(self, now: int) -> int:
        """Convert a time in nanoseconds to the unit of lines."""
        return (now - self._origin) // 1000

    def _follow(self, plan: StepPlan, deltas: list[Delta]) -> tuple[int | None, ...]:
        """Keep track of occupants and tokens, also in dropped steps; return `StepRecord.answered` of those that end."""
        for entry in plan.admissions:
            self._occupants[entry.slot] = lines.OccupancyEntry(entry.slot, entry.gen, entry.request_id)
        for revocation in plan.revocations:
            self._occupants.pop(revocation.slot, None)
        ended = {delta.request_id for delta in deltas if delta.finish_reason is not None}
        if ended:
            self._occupants = {slot: entry for slot, entry in self._occupants.items() if entry.request_id not in ended}
        got = self._got
        for delta in deltas:
            if delta.request_id in got:
                got[delta.request_id] += len(delta.token_ids)
        if not ended:
            return ()
        return tuple(None if delta.finish_reason is None else got.pop(delta.request_id, None) for delta in deltas)

    def _end(self) -> None:
        atexit.unregister(self._end)
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._file:
                while not self._ending.wait(_WRITE_SECONDS):
                    self._drain()
                self._drain()
                if self._closed is not None and self._begun:
                    dropped = self._closed.dropped + self._left_out
                    self._write(self._encoder.encode(msgspec.structs.replace(self._closed, dropped=dropped)))
        except Exception as error:  # noqa: BLE001 - any error: an engine must not wait for this thread
            self._failed = True
            self._queue.clear()
            reason = error if isinstance(error, OSError | ValueError) else type(error).__name__
            _log.warning("tracing stopped: cannot write %s: %s", self._path, reason)

    def _drain(self) -> None:
        wrote = False
        while self._queue:
            record = self._queue.popleft()
            if self._full:
                self._left_out += 1 + record.dropped
                continue
            line = self._encoder.encode(line_of(record))
            if self._has_room(len(line)):
                self._write(line)
            else:
                self._full = True
                self._write(self._encoder.encode(lines.LimitLine(full=self._limit)))
                _log.warning("tracing stopped: %s reached its limit of %s", self._path, format_size(self._limit))
                self._left_out += 1 + record.dropped
            wrote = True
            # Releases the GIL to the engine's thread at once instead of after a switch interval.
            time.sleep(0)
        if wrote:
            self._file.flush()

    def _has_room(self, count: int) -> bool:
        return self._written + count + 1 + _LAST_BYTES <= self._limit

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._written += len(line) + 1


def _text(letters: npt.NDArray[np.uint8], blank: str) -> str:
    """Return ASCII `letters` as text without trailing `blank`."""
    return letters.tobytes().decode("ascii").rstrip(blank)
