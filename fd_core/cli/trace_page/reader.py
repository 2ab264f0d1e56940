"""Reads a trace, also one that is cut off or damaged, and finds out who held which slot from when to when."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from fd_core.engine.trace_format import (
    COUNT_LETTERS,
    DECODE,
    DRAINING,
    FORMAT_VERSION,
    IDLE,
    LOADING,
    OLDEST_VERSION,
    PREFILL,
    Closed,
    Full,
    StepLine,
    TraceHeader,
)
from fd_core.errors import ConfigError
from fd_core.sizes import format_size
from fd_core.types import FinishReason

__all__ = ["EXITS", "StaySpan", "Trace", "read_trace"]

EXITS: Final = ("open", *(reason.value for reason in FinishReason), "preempted", "unknown", "engine ended")
"""How a stay can end."""

_MAX_LINE_BYTES: Final = 1 << 24
_MAX_SLOTS: Final = 1 << 16
_MAX_CELLS: Final = 100_000_000
"""Slots times steps that a page holds."""


@dataclass(slots=True)
class StaySpan:
    """A request's stay in a slot, in positions of the trace, both ends included."""

    slot: int
    gen: int
    request_id: str
    start: int
    returned: bool
    tokens: int
    """Tokens to prefill at the start, those whose KV was there among them; 0 if the trace does not say."""
    computed: int
    end: int = 0
    exit: str = "open"


@dataclass(slots=True)
class Position:
    """One step that was read, with what the lines before it say about it."""

    line: StepLine
    epoch: int
    """Index into `Trace.headers`."""
    missing: int
    """Steps before it that the trace does not have."""
    events: Counter[str]
    """`admitted`, `returned`, `preempted`, `aborted`, `late` (taken back after its request's end), `finished`."""
    recomputed: int
    """Tokens that requests which returned in this step must compute again."""


@dataclass(slots=True)
class Trace:
    """What could be read."""

    headers: list[TraceHeader]
    positions: deque[Position]
    first: int = 0
    """Number of the first of `positions`; stays count from the trace's own beginning."""
    stays: list[StaySpan] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What is missing, one sentence each."""

    @property
    def num_slots(self) -> int:
        """Slots of the largest epoch."""
        return max(header.limits.max_num_seqs for header in self.headers)


def read_trace(path: Path, last: int) -> Trace:
    """Read the last `last` steps of a trace.

    Raises `ConfigError` if the file cannot be read, is not a trace, or is of another format version.
    """
    try:
        with path.open("rb") as file:
            first = file.readline(_MAX_LINE_BYTES)
            header = _header(first, path)
            reader = _Reader(header, last)
            while raw := file.readline(_MAX_LINE_BYTES):
                reader.feed(raw)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}", field="FILE") from error
    return reader.result()


class _Version(msgspec.Struct):
    fdcore_trace: int


def _header(raw: bytes, path: Path | str) -> TraceHeader:
    try:
        version = msgspec.json.decode(raw, type=_Version).fdcore_trace
        if not OLDEST_VERSION <= version <= FORMAT_VERSION:
            raise ConfigError(
                f"{path} is a trace of format version {version}; this fdcore reads versions {OLDEST_VERSION} to "
                f"{FORMAT_VERSION}",
                field="FILE",
            )
        header = msgspec.json.decode(raw, type=TraceHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not a trace: its first line is not the header of one",
            field="FILE",
            hint="`fdcore serve --trace FILE` writes traces",
        ) from error
    if not 1 <= header.limits.max_num_seqs <= _MAX_SLOTS:
        raise ConfigError(f"{path} names {header.limits.max_num_seqs} slots; 1 to {_MAX_SLOTS} can be", field="FILE")
    return header


class _Reader:
    """Follows a trace line by line."""

    def __init__(self, header: TraceHeader, last: int) -> None:
        room = min(last, _MAX_CELLS // header.limits.max_num_seqs)
        self._trace = Trace([header], deque(maxlen=room))
        self._decoder = msgspec.json.Decoder(StepLine)
        self._stays = _Stays()
        self._count = 0
        self._expected = 0
        self._dropped = self._missing = self._damaged = 0
        self._closed = False
        self._limit: int | None = None
        """Bytes that the file reached, if it did."""
        self._full = False
        """Whether this epoch met the limit."""
        self._later = 0
        self._cut = False

    def feed(self, raw: bytes) -> None:
        """Take one line; one that makes no sense is counted."""
        self._cut = not raw.endswith(b"\n")
        if not raw.strip():
            return
        try:
            if raw.startswith(b'{"fdcore_trace"'):
                self._begin_epoch(_header(raw, "the trace"))
            elif raw.startswith(b'{"full"'):
                self._limit = msgspec.json.decode(raw, type=Full).full
                self._full = True
            elif raw.startswith(b'{"closed"'):
                dropped = msgspec.json.decode(raw, type=Closed).dropped
                if self._full:
                    self._later += dropped
                else:
                    self._dropped += dropped
                self._closed = True
            else:
                line = self._decoder.decode(raw)
                _check(line, self._trace.headers[-1])
                self._take(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError, ValueError):
            self._damaged += 1

    def result(self) -> Trace:
        """Return what was read and say what was not."""
        trace = self._trace
        self._stays.close_all(self._count - 1, "open")
        trace.first = self._count - len(trace.positions)
        for stay in self._stays.done:
            self._shorten(stay)
        trace.stays = [stay for stay in self._stays.done if stay.end >= trace.first and stay.end >= stay.start]
        trace.problems = list(self._problems())
        return trace

    # Inside -----------------------------------------------------------------------------------------------

    def _shorten(self, stay: StaySpan) -> None:
        """End a stay whose end is missing with the last step that computed something for it."""
        positions, first = self._trace.positions, self._trace.first
        while stay.exit == "unknown" and stay.end > max(stay.start, first):
            slots = positions[stay.end - first].line.slots
            if slots[stay.slot : stay.slot + 1] not in ("", IDLE, LOADING):
                break
            stay.end -= 1

    def _begin_epoch(self, header: TraceHeader) -> None:
        if header.limits.max_num_seqs > self._trace.num_slots:
            room = min(self._trace.positions.maxlen or 1, _MAX_CELLS // header.limits.max_num_seqs)
            self._trace.positions = deque(self._trace.positions, maxlen=room)
        self._trace.headers.append(header)
        self._stays.close_all(self._count - 1, "engine ended")
        self._stays.seen.clear()
        self._expected, self._closed, self._full = 0, False, False

    def _take(self, line: StepLine) -> None:
        if line.step < self._expected:
            raise ValueError(f"step {line.step} comes again")
        missing = line.step - self._expected
        dropped = min(missing, line.dropped)
        self._dropped += dropped
        self._missing += missing - dropped
        self._expected = line.step + 1
        seen = self._stays.seen
        again = sum(entry.tokens - entry.computed for entry in line.admitted if entry.request_id in seen)
        events = self._stays.follow(line, self._count)
        self._trace.positions.append(Position(line, len(self._trace.headers) - 1, missing, events, max(again, 0)))
        self._count += 1

    def _problems(self) -> Iterator[str]:
        left_out = self._count - len(self._trace.positions)
        if left_out:
            yield f"This page shows the last {len(self._trace.positions):,} of {self._count:,} steps."
        if self._limit is not None:
            later = f"{self._later:,} later steps" if self._later else "what came later"
            yield f"The file reached its limit of {format_size(self._limit)}: {later} cannot be shown."
        if self._dropped:
            yield f"{self._dropped:,} steps are missing because the engine was faster than the writer of the trace."
        if self._damaged and not (self._cut and self._damaged == 1):
            yield f"{self._damaged:,} lines of the file are damaged and were left out."
        if self._missing:
            yield f"{self._missing:,} steps are missing in the file."
        if self._cut:
            yield "The file is cut off in the middle of a line."
        if not self._closed and not self._full:
            yield "The trace has no closing line: the engine still runs or was killed, or the end of the file is lost."


def _check(line: StepLine, header: TraceHeader) -> None:
    """Raise `ValueError` if a line names what its header does not allow."""
    slots = header.limits.max_num_seqs
    named = [slot for slot, _ in (*line.chunks, *line.taken_back)]
    named += [entry.slot for entry in line.admitted] + [stay.slot for stay in line.occupants]
    named += [load.slot for load in line.loads]
    if max(len(line.slots), len(line.drafted), len(line.accepted), 1 + max(named, default=0)) > slots:
        raise ValueError("a slot that does not exist")
    letters = (IDLE + PREFILL + DECODE + DRAINING + LOADING, COUNT_LETTERS, COUNT_LETTERS)
    if any(text.strip(known) for text, known in zip((line.slots, line.drafted, line.accepted), letters, strict=True)):
        raise ValueError("a letter that means nothing")
    if line.ended < line.began:
        raise ValueError("a step that ends before it begins")
    times = [(load.began, load.ended) for load in line.loads] + [(save.began, save.ended) for save in line.saves]
    if any(ended < began for began, ended in times):
        raise ValueError("an operation that ends before it begins")


class _Stays:
    """Who holds which slot, followed over the steps."""

    def __init__(self) -> None:
        self.done: list[StaySpan] = []
        self.seen: set[str] = set()
        """Requests of this epoch that had a slot before."""
        self._open: dict[int, StaySpan] = {}
        self._of_request: dict[str, StaySpan] = {}

    def follow(self, line: StepLine, at: int) -> Counter[str]:
        """Apply a step and return what happened in it."""
        events: Counter[str] = Counter()
        for entry in line.admitted:
            returned = entry.request_id in self.seen
            self._begin(StaySpan(entry.slot, entry.gen, entry.request_id, at, returned, entry.tokens, entry.computed))
            events["returned" if returned else "admitted"] += 1
        reasons = {ended.request_id: ended.reason.value for ended in line.finished}
        for slot, gen in line.taken_back:
            stay = self._open.get(slot)
            if stay is None or stay.gen != gen:
                events["late"] += 1
                continue
            reason = reasons.get(stay.request_id)
            events["aborted" if reason == FinishReason.ABORT else "preempted"] += 1
            self._end(stay, at, reason or "preempted")
        for request_id, reason in reasons.items():
            events["finished"] += 1
            if request_id in self._of_request:
                self._end(self._of_request[request_id], at, reason)
        if line.dropped:
            self._reconcile(line, at)
        return events

    def close_all(self, at: int, how: str) -> None:
        """End every stay that is open."""
        for stay in list(self._open.values()):
            self._end(stay, at, how)

    def _begin(self, stay: StaySpan) -> None:
        before = self._open.get(stay.slot)
        if before is not None:
            self._end(before, stay.start - 1, "unknown")
        self.seen.add(stay.request_id)
        self._open[stay.slot] = self._of_request[stay.request_id] = stay

    def _end(self, stay: StaySpan, at: int, how: str) -> None:
        stay.end, stay.exit = at, how
        self.done.append(stay)
        del self._open[stay.slot]
        if self._of_request.get(stay.request_id) is stay:
            del self._of_request[stay.request_id]

    def _reconcile(self, line: StepLine, at: int) -> None:
        """Steps are missing: the line says who is there."""
        there = {stay.slot: stay for stay in line.occupants}
        for slot, stay in list(self._open.items()):
            now = there.get(slot)
            if now is None or (now.gen, now.request_id) != (stay.gen, stay.request_id):
                self._end(stay, at - 1, "unknown")
        for slot, now in there.items():
            if slot not in self._open:
                self._begin(StaySpan(slot, now.gen, now.request_id, at, now.request_id in self.seen, 0, 0))
