"""The trace: what happened in each step, as JSON lines that `fdcore trace` shows as a page.

    engine's loop                      writer's thread                     file
    step_ended(...) --> bounded queue --> line of the step as JSON --> header, steps, closing line

The loop hands over frozen values and goes on: it does no I/O and waits for no lock. If the writer falls behind, steps
are dropped and counted; the next step that is written says how many are missing and who holds which slot.

A trace holds request ids, numbers of tokens and times, never prompts or tokens. Gauges are those right after the
step's commit; with two steps in flight the plan of the following step is in them already. After a restart of the
engine the trace goes on in the same file behind a header with the next epoch. A file that has reached its limit gets a
line that says so; later steps are counted and left out, so that a long run cannot fill the disk.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core import signals
from fd_core.engine.messages import Delta
from fd_core.engine.trace_format import (
    COUNT_LETTERS,
    DECODE,
    DRAINING,
    IDLE,
    LOADING,
    PREFILL,
    Admitted,
    Chosen,
    Closed,
    Ended,
    Full,
    LoadEnded,
    SaveEnded,
    Stay,
    StepLine,
    TraceHeader,
)
from fd_core.errors import ConfigError
from fd_core.scheduling.scheduler import Scheduler
from fd_core.sizes import format_size
from fd_core.types import StepOutput, StepPlan

__all__ = ["StepRecord", "TraceWriter", "line_of", "require_trace_file"]

_log = logging.getLogger(__name__)

_MAGIC: Final = b'{"fdcore_trace":'
_MAX_QUEUED: Final = 4096
"""Steps that may wait for the writer; more are dropped."""
_WRITE_SECONDS: Final = 0.05
"""How long the writer sleeps when nothing is left; what it wrote is flushed before it sleeps."""
_LAST_BYTES: Final = 256
"""Room that is kept for the lines `Full` and `Closed`."""
_LETTER_CODES: Final = np.frombuffer(COUNT_LETTERS.encode(), np.uint8)


class StepRecord(msgspec.Struct, frozen=True, gc=False):
    """What the loop hands to the writer: values that nobody changes any more."""

    began: int
    ended: int
    plan: StepPlan
    output: StepOutput
    deltas: tuple[Delta, ...]
    waiting: int
    kv: tuple[int, int, int]
    dropped: int
    occupants: tuple[Stay, ...]
    loading: npt.NDArray[np.bool_] | None = None
    """bool[num_slots]: whose KV is on its way, None if nobody's."""
    kept: tuple[Chosen | LoadEnded | SaveEnded, ...] = ()


def line_of(record: StepRecord) -> StepLine:
    """Return the line that says what `record` holds, without tokens."""
    plan, output = record.plan, record.output
    letters = np.full(len(output.gens), ord(IDLE), np.uint8)
    if record.loading is not None:
        letters[record.loading] = ord(LOADING)
    prefills = ~plan.samples | (plan.num_tokens - plan.num_drafts > 1)
    letters[plan.slots] = np.where(prefills, ord(PREFILL), ord(DECODE))
    for back in plan.revocations:
        letters[back.slot] = ord(DRAINING)
    chunked = plan.slots[prefills]
    drafted = accepted = ""
    if plan.num_drafts.any():
        drafts, kept = np.zeros((2, len(letters)), np.int32)
        drafts[plan.slots] = plan.num_drafts
        counts = signals.read(output.tokens, output.errors).counts
        answered = plan.samples & (output.gens[plan.slots] == plan.gens)
        kept[plan.slots] = np.where(answered, np.maximum(counts[plan.slots] - 1, 0), 0)
        drafted, accepted = _text(_LETTER_CODES[drafts], "0"), _text(_LETTER_CODES[kept], "0")
    return StepLine(
        step=plan.step,
        began=record.began,
        ended=record.ended,
        budget=plan.total_tokens,
        delivered=sum(len(delta.token_ids) for delta in record.deltas),
        waiting=record.waiting,
        kv=record.kv,
        slots=_text(letters, IDLE),
        drafted=drafted,
        accepted=accepted,
        chunks=tuple(zip(chunked.tolist(), plan.num_tokens[prefills].tolist(), strict=True)),
        admitted=tuple(
            Admitted(entry.slot, entry.gen, entry.request_id, len(entry.token_ids), entry.computed)
            for entry in plan.admissions
        ),
        taken_back=tuple((back.slot, back.gen) for back in plan.revocations),
        finished=tuple(
            Ended(delta.request_id, delta.finish_reason) for delta in record.deltas if delta.finish_reason is not None
        ),
        chosen=tuple(entry for entry in record.kept if isinstance(entry, Chosen)),
        loads=tuple(entry for entry in record.kept if isinstance(entry, LoadEnded)),
        saves=tuple(entry for entry in record.kept if isinstance(entry, SaveEnded)),
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
            f"{path} exists and is not a trace", field="--trace", hint="name another file or remove this one"
        )


class TraceWriter:
    """Writes one epoch of a trace from a thread of its own.

    An epoch above 1 is appended. The file stays within `limit` bytes, unless its first header alone is larger. If it
    cannot be written any more, tracing ends with a warning and the engine goes on. Raises `ConfigError` if it cannot be
    opened.
    """

    def __init__(self, path: Path, header: TraceHeader, origin: int, limit: int) -> None:
        """`origin` is time 0 of the lines, in nanoseconds of the clock that the other calls use."""
        self._path = path
        self._limit = limit
        self._origin = self._began = origin
        self._queue: deque[StepRecord] = deque()
        self._dropped = 0
        self._kept: list[Chosen | LoadEnded | SaveEnded] = []
        """What the next line will say of KV outside the device."""
        self._closed: Closed | None = None
        self._ending = threading.Event()
        self._failed = self._full = False
        self._left_out = 0
        """Steps that were queued when the file was full; the writer's own."""
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
        # What led to a crash is what a reader of the trace wants to see.
        atexit.register(self._end)

    def turn_began(self, now: int) -> None:
        """Note when, in nanoseconds, the turn began that commits the next step."""
        self._began = now

    def clock(self, now: int) -> int:
        """Return a time in nanoseconds as lines have it."""
        return (now - self._origin) // 1000

    def kept(self, entry: Chosen | LoadEnded | SaveEnded) -> None:
        """Note what happened to KV outside the device; it is told with the next step."""
        if not (self._failed or self._full):
            self._kept.append(entry)

    def step_ended(
        self, now: int, scheduler: Scheduler, plan: StepPlan, output: StepOutput, deltas: list[Delta]
    ) -> None:
        """Hand over a committed step, or count it as dropped if too many wait to be written."""
        if len(self._queue) >= _MAX_QUEUED or self._failed or self._full:
            self._dropped += 1
            self._kept.clear()
            return
        pool, loading = scheduler.pool, scheduler.slots.loading
        self._queue.append(
            StepRecord(
                self.clock(self._began),
                self.clock(now),
                plan,
                output,
                tuple(deltas),
                len(scheduler.waiting),
                (pool.num_owned, pool.num_fenced, pool.num_cached),
                self._dropped,
                _occupants(scheduler) if self._dropped else (),
                loading.copy() if loading.any() else None,
                tuple(self._kept),
            )
        )
        self._kept.clear()
        self._dropped = 0

    def close(self, now: int) -> None:
        """Write what waits and the closing line; idempotent."""
        if self._closed is None:
            self._closed = Closed(closed=self.clock(now), dropped=self._dropped)
        self._end()

    # Inside -----------------------------------------------------------------------------------------------

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
        except (OSError, ValueError) as error:
            self._failed = True
            self._queue.clear()
            _log.warning("tracing ends: cannot write %s: %s", self._path, error)

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
                self._end_for_want_of_room()
                self._left_out += 1 + record.dropped
            wrote = True
            # Lets the engine's thread have the interpreter at once instead of after a switch interval.
            time.sleep(0)
        if wrote:
            self._file.flush()

    def _has_room(self, count: int) -> bool:
        return self._written + count + 1 + _LAST_BYTES <= self._limit

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._written += len(line) + 1

    def _end_for_want_of_room(self) -> None:
        self._full = True
        self._write(self._encoder.encode(Full(full=self._limit)))
        _log.warning("tracing ends: %s has reached its limit of %s", self._path, format_size(self._limit))


def _occupants(scheduler: Scheduler) -> tuple[Stay, ...]:
    slots = scheduler.slots
    return tuple(
        Stay(slot, int(slots.gen[slot]), request.spec.request_id)
        for slot, request in enumerate(slots.requests)
        # Who is being loaded was not admitted yet.
        if request is not None and not slots.loading[slot]
    )


def _text(letters: npt.NDArray[np.uint8], blank: str) -> str:
    """Return ASCII `letters` as text without trailing `blank`."""
    return letters.tobytes().decode("ascii").rstrip(blank)
