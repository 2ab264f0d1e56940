"""Reads a trace, even a truncated or damaged one, and reconstructs which request held which slot, and when."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.config.sizes import format_size
from fd_core.engine.tracing import format as lines
from fd_core.errors import ConfigError
from fd_core.types import FinishReason

EXITS: Final = ("open", *(reason.value for reason in FinishReason), "preempted", "unknown", "engine ended")

_MAX_LINE_BYTES: Final = 1 << 24
_MAX_SLOTS: Final = 1 << 16
_MAX_CELLS: Final = 100_000_000
"""Limit of slots times steps of a page."""
KINDS: Final = ("idle", "unscheduled", "prefill", "decode", "draining", "overrun", "loading")
"""Work of a step for a slot. *unscheduled*: its request had no row in the step; *overrun*: computed for a request
that had ended by then, which a pipeline cannot avoid."""
_UNSCHEDULED, _PREFILL, _DECODE, _DRAINING, _OVERRUN, _LOADING = range(1, len(KINDS))


class OccupancySpan(msgspec.Struct):
    """Occupancy of a slot by a request, in positions of the trace, both ends included."""

    slot: int
    gen: int
    request_id: str
    start: int
    returned: bool
    tokens: int
    """Tokens at the admission, including tokens whose KV existed; 0 if the trace does not contain it."""
    computed: int
    end: int = 0
    exit: str = "open"


class Position(msgspec.Struct):
    """One step that was read, with the data of the lines before it."""

    line: lines.StepLine
    epoch: int
    """Index into `TraceContents.headers`."""
    missing: int
    """Steps before it that are missing from the trace."""
    events: Counter[str]
    """`admitted`, `returned`, `preempted`, `aborted`, `late` (freed after its request's end), `finished`."""
    recomputed: int
    """Tokens that requests which returned in this step must compute again."""


class TraceContents(msgspec.Struct):
    """The steps and slot occupancies that could be read from a trace."""

    headers: list[lines.TraceHeader]
    positions: deque[Position]
    first: int = 0
    """Number of the first of `positions`; occupancies count from the trace's own beginning."""
    occupancies: list[OccupancySpan] = []
    problems: list[str] = []
    """One sentence per missing part."""

    @property
    def num_slots(self) -> int:
        """Slots of the largest epoch."""
        return max(header.limits.max_num_seqs for header in self.headers)

    def offsets(self) -> list[int]:
        """Return the begin of each epoch, in microseconds; no epoch begins before the last step of its predecessor."""
        ends = [0] * len(self.headers)
        for position in self.positions:
            ends[position.epoch] = position.line.ended
        offsets = [0]
        for before, after, end in zip(self.headers, self.headers[1:], ends, strict=False):
            offsets.append(offsets[-1] + max(round(1e6 * (after.started - before.started)), end))
        return offsets


def read_trace(path: Path, last: int) -> TraceContents:
    """Read the last `last` steps. Raises `ConfigError` for a file that is not a trace of a supported version."""
    raw_lines = _raw_lines(path)
    reader = _TraceReader(_header(next(raw_lines, b""), path), last)
    for raw in raw_lines:
        reader.feed(raw)
    return reader.result()


def read_lines(path: Path) -> Iterator[lines.TraceHeader | lines.StepLine]:
    """Yield the headers and steps that are complete, without keeping them. Raises `ConfigError` like `read_trace`."""
    decoder, raw_lines = msgspec.json.Decoder(lines.StepLine), _raw_lines(path)
    header = _header(next(raw_lines, b""), path)
    yield header
    for raw in raw_lines:
        try:
            if raw.startswith(b'{"fdcore_trace"'):
                header = _header(raw, path)
                yield header
            elif raw.startswith(b'{"step"'):
                line = decoder.decode(raw)
                _check(line, header)
                yield line
        except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError, ValueError):
            continue


def _raw_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while raw := file.readline(_MAX_LINE_BYTES):
                yield raw
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}", field="FILE") from error


class _Version(msgspec.Struct):
    fdcore_trace: int


def _header(raw: bytes, path: Path | str) -> lines.TraceHeader:
    try:
        version = msgspec.json.decode(raw, type=_Version).fdcore_trace
        if not lines.OLDEST_VERSION <= version <= lines.FORMAT_VERSION:
            raise ConfigError(
                f"{path} has trace format version {version}; supported versions are {lines.OLDEST_VERSION} to "
                f"{lines.FORMAT_VERSION}",
                field="FILE",
            )
        header = msgspec.json.decode(raw, type=lines.TraceHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not a trace: its first line is not a trace header",
            field="FILE",
            hint="use a file written by `fdcore serve --trace FILE`",
        ) from error
    if not 1 <= header.limits.max_num_seqs <= _MAX_SLOTS:
        raise ConfigError(f"{path} has {header.limits.max_num_seqs} slots; expected 1 to {_MAX_SLOTS}", field="FILE")
    return header


class _TraceReader:
    """Reads a trace line by line."""

    def __init__(self, header: lines.TraceHeader, last: int) -> None:
        room = min(last, _MAX_CELLS // header.limits.max_num_seqs)
        self._trace = TraceContents([header], deque(maxlen=room))
        self._decoder = msgspec.json.Decoder(lines.StepLine)
        self._occupancies = _OccupancyTracker()
        self._count = 0
        self._expected = 0
        self._dropped = self._missing = self._damaged = 0
        self._closed = False
        self._limit: int | None = None
        """Size of the file at its limit, in bytes, if it was reached."""
        self._full = False
        """True if this epoch reached the limit."""
        self._later = 0
        self._cut = False

    def feed(self, raw: bytes) -> None:
        """Read one line; a line that cannot be parsed is counted as damaged."""
        self._cut = not raw.endswith(b"\n")
        if not raw.strip():
            return
        try:
            if raw.startswith(b'{"fdcore_trace"'):
                self._begin_epoch(_header(raw, "the trace"))
            elif raw.startswith(b'{"full"'):
                self._limit = msgspec.json.decode(raw, type=lines.LimitLine).full
                self._full = True
            elif raw.startswith(b'{"closed"'):
                dropped = msgspec.json.decode(raw, type=lines.ClosingLine).dropped
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

    def result(self) -> TraceContents:
        trace = self._trace
        self._occupancies.close_all(self._count - 1, "open")
        trace.first = self._count - len(trace.positions)
        for span in self._occupancies.done:
            self._shorten(span)
        trace.occupancies = [
            span for span in self._occupancies.done if span.end >= trace.first and span.end >= span.start
        ]
        trace.problems = list(self._problems())
        return trace

    def _shorten(self, occupancy: OccupancySpan) -> None:
        """End an occupancy whose end is missing with the last step that computed something for it."""
        positions, first = self._trace.positions, self._trace.first
        while occupancy.exit == "unknown" and occupancy.end > max(occupancy.start, first):
            slots = positions[occupancy.end - first].line.slots
            if slots[occupancy.slot : occupancy.slot + 1] not in ("", lines.IDLE, lines.LOADING):
                break
            occupancy.end -= 1

    def _begin_epoch(self, header: lines.TraceHeader) -> None:
        if header.limits.max_num_seqs > self._trace.num_slots:
            room = min(self._trace.positions.maxlen or 1, _MAX_CELLS // header.limits.max_num_seqs)
            self._trace.positions = deque(self._trace.positions, maxlen=room)
        self._trace.headers.append(header)
        self._occupancies.close_all(self._count - 1, "engine ended")
        self._occupancies.seen.clear()
        self._expected, self._closed, self._full = 0, False, False

    def _take(self, line: lines.StepLine) -> None:
        if line.step < self._expected:
            raise ValueError(f"step {line.step} is duplicated or out of order")
        missing = line.step - self._expected
        dropped = min(missing, line.dropped)
        self._dropped += dropped
        self._missing += missing - dropped
        self._expected = line.step + 1
        seen = self._occupancies.seen
        again = sum(entry.tokens - entry.computed for entry in line.admitted if entry.request_id in seen)
        events = self._occupancies.follow(line, self._count)
        self._trace.positions.append(Position(line, len(self._trace.headers) - 1, missing, events, max(again, 0)))
        self._count += 1

    def _problems(self) -> Iterator[str]:
        left_out = self._count - len(self._trace.positions)
        if left_out:
            yield f"This page shows the last {len(self._trace.positions):,} of {self._count:,} steps."
        if self._limit is not None:
            later = f"{self._later:,} later steps" if self._later else "all later steps"
            yield f"The file reached its limit of {format_size(self._limit)}: {later} are missing."
        if self._dropped:
            yield f"{self._dropped:,} steps were dropped because the trace writer was too slow."
        if self._damaged and not (self._cut and self._damaged == 1):
            yield f"{self._damaged:,} damaged lines of the file were skipped."
        if self._missing:
            yield f"{self._missing:,} steps are missing from the file."
        if self._cut:
            yield "The file is truncated in the middle of a line."
        if not self._closed and not self._full:
            yield "The trace has no closing line: the engine is still running or was killed, or the file is truncated."


def _check(line: lines.StepLine, header: lines.TraceHeader) -> None:
    """Raise `ValueError` if a line contradicts its header."""
    slots = header.limits.max_num_seqs
    named = [slot for slot, _ in (*line.chunks, *line.revoked)]
    named += [entry.slot for entry in line.admitted] + [occupancy.slot for occupancy in line.occupants]
    named += [load.slot for load in line.loads]
    texts = (line.slots, line.drafted, line.accepted, line.forced)
    if max(*map(len, texts), 1 + max(named, default=0)) > slots:
        raise ValueError("slot out of range")
    states = lines.IDLE + lines.PREFILL + lines.DECODE + lines.DRAINING + lines.LOADING
    if line.slots.strip(states) or any(text.strip(lines.COUNT_LETTERS) for text in texts[1:]):
        raise ValueError("unknown letter")
    if line.ended < line.began:
        raise ValueError("a step ends before it begins")
    times = [(load.began, load.ended) for load in line.loads] + [(save.began, save.ended) for save in line.saves]
    if any(ended < began for began, ended in times):
        raise ValueError("an operation ends before it begins")


class _OccupancyTracker:
    """Tracks over the steps which request holds which slot."""

    def __init__(self) -> None:
        self.done: list[OccupancySpan] = []
        self.seen: set[str] = set()
        """Requests of this epoch that had a slot before."""
        self._open: dict[int, OccupancySpan] = {}
        self._of_request: dict[str, OccupancySpan] = {}

    def follow(self, line: lines.StepLine, at: int) -> Counter[str]:
        """Apply a step and return the number of events of each kind."""
        events: Counter[str] = Counter()
        for entry in line.admitted:
            returned = entry.request_id in self.seen
            self._begin(
                OccupancySpan(entry.slot, entry.gen, entry.request_id, at, returned, entry.tokens, entry.computed)
            )
            events["returned" if returned else "admitted"] += 1
        reasons = {entry.request_id: entry.reason.value for entry in line.finished}
        for slot, gen in line.revoked:
            occupancy = self._open.get(slot)
            if occupancy is None or occupancy.gen != gen:
                events["late"] += 1
                continue
            reason = reasons.get(occupancy.request_id)
            events["aborted" if reason == FinishReason.ABORT else "preempted"] += 1
            self._end(occupancy, at, reason or "preempted")
        for request_id, reason in reasons.items():
            events["finished"] += 1
            if request_id in self._of_request:
                self._end(self._of_request[request_id], at, reason)
        if line.dropped:
            self._reconcile(line, at)
        return events

    def close_all(self, at: int, how: str) -> None:
        for occupancy in list(self._open.values()):
            self._end(occupancy, at, how)

    def _begin(self, occupancy: OccupancySpan) -> None:
        before = self._open.get(occupancy.slot)
        if before is not None:
            self._end(before, occupancy.start - 1, "unknown")
        self.seen.add(occupancy.request_id)
        self._open[occupancy.slot] = self._of_request[occupancy.request_id] = occupancy

    def _end(self, occupancy: OccupancySpan, at: int, how: str) -> None:
        occupancy.end, occupancy.exit = at, how
        self.done.append(occupancy)
        del self._open[occupancy.slot]
        if self._of_request.get(occupancy.request_id) is occupancy:
            del self._of_request[occupancy.request_id]

    def _reconcile(self, line: lines.StepLine, at: int) -> None:
        """Correct the occupancies after missing steps, from the occupants that the line names."""
        there = {occupancy.slot: occupancy for occupancy in line.occupants}
        for slot, occupancy in list(self._open.items()):
            now = there.get(slot)
            if now is None or (now.gen, now.request_id) != (occupancy.gen, occupancy.request_id):
                self._end(occupancy, at - 1, "unknown")
        for slot, now in there.items():
            if slot not in self._open:
                self._begin(OccupancySpan(slot, now.gen, now.request_id, at, now.request_id in self.seen, 0, 0))


def kinds_of_cells(trace: TraceContents) -> npt.NDArray[np.uint8]:
    """Return uint8[slots, steps], indices into `KINDS`."""
    codes = {
        lines.IDLE: 0,
        lines.PREFILL: _PREFILL,
        lines.DECODE: _DECODE,
        lines.DRAINING: _DRAINING,
        lines.LOADING: _LOADING,
    }
    kinds = matrix_of_letters(trace, [position.line.slots for position in trace.positions], codes)
    depth = max(header.limits.pipeline_depth for header in trace.headers)
    starts = {(occupancy.slot, occupancy.start) for occupancy in trace.occupancies}
    for occupancy in trace.occupancies:
        begin, end = max(occupancy.start - trace.first, 0), occupancy.end - trace.first
        span = kinds[occupancy.slot, begin : end + 1]
        span[span == 0] = _UNSCHEDULED
        if occupancy.exit in ("open", "preempted", "unknown", "engine ended"):
            continue
        for at in range(end + 1, min(end + depth, kinds.shape[1])):
            if (occupancy.slot, at + trace.first) in starts:
                break
            if kinds[occupancy.slot, at] in (_PREFILL, _DECODE):
                kinds[occupancy.slot, at] = _OVERRUN
    return kinds


def matrix_of_letters(trace: TraceContents, texts: list[str], codes: dict[str, int]) -> npt.NDArray[np.uint8]:
    """Return uint8[slots, steps]: the code of each letter in the `texts` of the steps; 0 where a text has ended."""
    table = np.zeros(256, np.uint8)
    for letter, code in codes.items():
        table[ord(letter)] = code
    by_step = np.zeros((len(texts), trace.num_slots), np.uint8)
    for index, text in enumerate(texts):
        by_step[index, : len(text)] = np.frombuffer(text.encode("ascii"), np.uint8)
    return np.ascontiguousarray(table[by_step].T)
