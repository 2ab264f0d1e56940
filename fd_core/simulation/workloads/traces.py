"""Traces of requests with times: Mooncake's JSON lines, Azure's CSV, and the traces of fd_core's servers."""

from __future__ import annotations

import csv
import hashlib
import itertools
from array import array
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from fd_core.engine.tracing.format import COUNT_LETTERS, DECODE, FORMAT_VERSION, PREFILL, StepLine, TraceHeader
from fd_core.engine.tracing.reader import read_lines
from fd_core.simulation.workloads.conversations import RecordedRequests
from fd_core.simulation.workloads.files import lines_of, opened, wrong_file, wrong_line
from fd_core.simulation.workloads.settings import MAX_REQUESTS, MAX_SECONDS, MAX_TOKENS, WorkloadSettings, stir

_MAX_HASH_IDS: Final = 1 << 27
"""Limit of a trace: a gibibyte while it is read."""

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class _TraceColumns:
    """Requests as they are read, in any order."""

    def __init__(self) -> None:
        self._times, self._prompts, self._outputs = array("d"), array("q"), array("q")
        self.hash_ids, self._ends = array("Q"), array("q")
        self._images: dict[int, Sequence[int]] = {}

    def add(
        self, time: float, prompt: int, output: int, hash_ids: Sequence[int] = (), images: Sequence[int] = ()
    ) -> None:
        if images:
            self._images[len(self._times)] = images
        self._times.append(time)
        self._prompts.append(max(prompt, 1))
        self._outputs.append(max(output, 1))
        self.hash_ids.extend(hash_ids)
        self._ends.append(len(self.hash_ids))

    def requests(self, path: Path, speed: float, block: int, *notes: str) -> RecordedRequests:
        """Return them in order of time, equal times in that of the file. Raises `ConfigError` if there are none."""
        if not self._times:
            raise wrong_file(f"{path} holds no request", "name a trace that is not empty")
        times, ends = np.array(self._times), np.array(self._ends)
        order = np.argsort(times, kind="stable")
        ids = stir(self.hash_ids)
        if (order[1:] < order[:-1]).any():
            notes = (*notes, "sorted by time")
            sizes = np.diff(ends, prepend=0)
            begins = ends - sizes
            ids = np.concatenate([ids[begins[at] : ends[at]] for at in order]) if len(ids) else ids
            ends = np.cumsum(sizes[order])
        times = times[order] - times.min()
        if times[-1] > MAX_SECONDS * speed:
            what = f"{path} lasts {times[-1] / speed:,.0f} s; {MAX_SECONDS:,.0f} can be"
            raise wrong_file(what, "cut it into parts, or raise speed")
        prompts, outputs = np.array(self._prompts)[order], np.array(self._outputs)[order]
        places = {at: self._images[line] for at, line in enumerate(order.tolist()) if line in self._images}
        return RecordedRequests(
            notes, times, prompts, outputs, ids, ends if len(ids) else ends[:0], block=block, images=places
        )


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[int | str] = []
    images: Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]], msgspec.Meta(max_length=1024)] = []


def read_mooncake(path: Path, settings: WorkloadSettings) -> RecordedRequests:
    """Read Mooncake's trace: `timestamp` in ms, `input_length`, `output_length`, `hash_ids`, and `images`.

    `images` are the tokens of each image, in addition to `input_length`. Raises `ConfigError`.
    """
    columns, decoder = _TraceColumns(), msgspec.json.Decoder(_MooncakeLine)
    shared = False
    for number, raw in _first(path, settings):
        try:
            line = decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise wrong_line(path, number, f"is no request of a Mooncake trace: {error}") from error
        shared = shared or bool(line.hash_ids)
        # Ignore more blocks than the prompt has.
        ids = [*map(_hash_id, line.hash_ids[: -(-line.input_length // settings.block)])]
        columns.add(line.timestamp / 1000, line.input_length, line.output_length, ids, line.images)
        if len(columns.hash_ids) > _MAX_HASH_IDS:
            raise wrong_line(path, number, f"has one hash id too many: {_MAX_HASH_IDS:,} can be")
    return columns.requests(
        path, settings.speed, settings.block, *(() if shared else ("no hash ids: no prefix is shared",))
    )


def _hash_id(value: int | str) -> int:
    if isinstance(value, str):
        return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest())
    return value & (2**64 - 1)


def read_azure(path: Path, settings: WorkloadSettings) -> RecordedRequests:
    """Read a CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens. Raises `ConfigError`."""
    columns = _TraceColumns()
    wanted = ("timestamp", "contexttokens", "generatedtokens")
    places: list[int] = []
    # Skip the heading.
    for number, raw in _first(path, settings, 1):
        try:
            cells = next(csv.reader([raw.decode("utf-8-sig").strip()]))
            if not places:
                names = [cell.strip().lower() for cell in cells]
                missing = [name for name in wanted if name not in names]
                if missing:
                    what = f"TIMESTAMP,ContextTokens,GeneratedTokens: there is no {', '.join(missing)}"
                    raise wrong_line(path, number, f"has no heading {what}")
                places = [names.index(name) for name in wanted]
                continue
            time, prompt, output = (cells[place] for place in places)
            columns.add(_seconds(time), _tokens(prompt), _tokens(output))
        except (ValueError, IndexError, csv.Error) as error:
            raise wrong_line(path, number, f"is no request of an Azure trace: {error}") from error
    return columns.requests(path, settings.speed, 1, "no prefix is shared: the trace does not say which are")


def _seconds(text: str) -> float:
    moment = datetime.fromisoformat(text.strip())
    # Independent of this machine's time zone.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _tokens(text: str) -> int:
    value = float(text)
    if not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{text} tokens; 0 to {MAX_TOKENS:,} can be")
    return int(value)


def _first(path: Path, settings: WorkloadSettings, headings: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the headings, and as many lines after them as requests are wanted."""
    return itertools.islice(lines_of(path), None if settings.requests is None else headings + settings.requests)


def read_own_trace(path: Path, settings: WorkloadSettings) -> RecordedRequests:
    """Read a trace that a server wrote with `--trace`.

    Traces before format version 3 have neither arrivals nor lengths of answers: a request counts from its admission,
    and its answer has a token for each of its decodes, as far as the lines exist. Raises `ConfigError`.
    """
    opened(path).close()
    replay = _OwnTrace()
    for line in read_lines(path):
        if isinstance(line, TraceHeader):
            replay.begin(line)
        else:
            replay.follow(line)
        if len(replay.came) > MAX_REQUESTS:
            raise wrong_file(f"{path} has more than {MAX_REQUESTS:,} requests", "name a shorter one")
    columns = _TraceColumns()
    for request_id, (time, tokens) in sorted(replay.came.items(), key=lambda item: item[1][0])[: settings.requests]:
        columns.add(time, tokens, replay.got.get(request_id, 1))
    return columns.requests(path, settings.speed, 1, *replay.notes())


class _OwnTrace:
    """Parser state of an fd_core trace."""

    def __init__(self) -> None:
        self.came: dict[str, tuple[float, int]] = {}
        """Arrival of each request, in seconds, and the tokens of its prompt."""
        self.got: dict[str, int] = {}
        """Tokens of its answer, as far as known."""
        self._ended: set[str] = set()
        self._version = FORMAT_VERSION
        self._started = 0.0
        self._next = self._missing = 0
        self._occupants: dict[int, str] = {}
        self._slots: dict[str, int] = {}
        self._left: dict[str, int] = {}
        """Tokens that each occupant has to compute before it yields one."""

    def begin(self, header: TraceHeader) -> None:
        self._version, self._started = min(self._version, header.fdcore_trace), header.started
        self._next = 0
        self._occupants.clear()
        self._slots.clear()

    def follow(self, line: StepLine) -> None:
        self._missing += max(line.step - self._next, 0)
        self._next = line.step + 1
        for arrival in line.arrived:
            self.came.setdefault(arrival.request_id, (self._started + arrival.at / 1e6, arrival.tokens))
        for entry in line.admitted:
            self.came.setdefault(entry.request_id, (self._started + line.began / 1e6, entry.tokens))
            self._occupants[entry.slot] = entry.request_id
            self._slots[entry.request_id] = entry.slot
            self._left[entry.request_id] = entry.tokens - entry.computed
        if self._version < FORMAT_VERSION:
            self._count(line)
        for slot, _ in line.revoked:
            self._slots.pop(self._occupants.pop(slot, ""), None)
        for finish in line.finished:
            self._ended.add(finish.request_id)
            self._left.pop(finish.request_id, None)
            self._occupants.pop(self._slots.pop(finish.request_id, -1), None)
            if finish.tokens is not None:
                self.got[finish.request_id] = finish.tokens

    def notes(self) -> Iterator[str]:
        yield "no prefix is shared: the trace does not say which are"
        if self._version < FORMAT_VERSION:
            yield f"format version {self._version}: arrivals are admissions, and answers are counted by their decodes"
        if self._missing:
            yield f"{self._missing:,} steps are missing, and with them what came there"
        if left := len(self.came.keys() - self._ended):
            yield f"the ends of {left:,} answers are missing"

    def _count(self, line: StepLine) -> None:
        chunks = dict(line.chunks)
        for slot, request_id in self._occupants.items():
            letter = line.slots[slot : slot + 1]
            if letter not in {PREFILL, DECODE}:
                continue
            left = max(self._left.get(request_id, 0) - chunks.get(slot, 1), 0)
            self._left[request_id] = left
            if not left:
                accepted = COUNT_LETTERS.index(line.accepted[slot]) if slot < len(line.accepted) else 0
                self.got[request_id] = self.got.get(request_id, 0) + 1 + accepted
