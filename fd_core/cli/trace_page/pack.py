"""Packs a trace into arrays and these into one self-contained HTML page."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.engine.tracing.format import COUNT_LETTERS, IDLE, total
from fd_core.engine.tracing.reader import EXITS, KINDS, Position, TraceContents, kinds_of_cells, matrix_of_letters
from fd_core.http.pages.assembling import assemble

_EVENTS: Final = ("admitted", "returned", "preempted", "aborted", "late", "finished")
_SCRIPTS: Final = ("data.js", "panels.js", "view.js")


def page(trace: TraceContents, title: str) -> str:
    """Return the page as HTML text; `title` is the title of the browser's tab."""
    requests = _request_ids(trace)
    number = {request_id: index for index, request_id in enumerate(requests)}
    chunks = [(index, *chunk) for index, position in enumerate(trace.positions) for chunk in position.line.chunks]
    sections = columns(trace) | _named("chunk", ("Step", "Slot", "Tokens"), chunks, dtype=np.int32) | cells(trace)
    sections |= _residencies(trace, number) | _loads(trace, number) | _decisions(trace, number)
    blob, places = _joined(sections)
    facts: dict[str, Any] = {
        "title": title,
        "headers": trace.headers,
        "problems": trace.problems,
        "numSlots": trace.num_slots,
        "numSteps": len(trace.positions),
        "requests": requests,
        "kinds": KINDS,
        "exits": EXITS,
        "sections": places,
    }
    values = {
        # Text from a trace must not close the element that contains it.
        "facts": msgspec.json.encode(facts).decode().replace("<", "\\u003c"),
        "data": base64.b64encode(zlib.compress(blob, 6)).decode("ascii"),
    }
    return assemble(__package__, "fd_core trace", shared=("theme.css",), own=("page.css", *_SCRIPTS), values=values)


def columns(trace: TraceContents) -> dict[str, npt.NDArray[Any]]:
    """Return one float64[steps] for each figure of a step; times are milliseconds from the start of the trace."""
    offsets = trace.offsets()

    def row(position: Position) -> tuple[float, ...]:
        line, limits = position.line, trace.headers[position.epoch].limits
        drafted, accepted = total(line.drafted), total(line.accepted)
        prefill = sum(tokens for _, tokens in line.chunks)
        loaded = sum(load.loaded for load in line.loads)
        return (
            line.step,
            position.epoch,
            (offsets[position.epoch] + line.began) / 1000,
            (offsets[position.epoch] + line.ended) / 1000,
            prefill,
            line.budget - prefill - drafted,
            drafted,
            accepted,
            total(line.forced),
            limits.max_num_batched_tokens,
            line.delivered,
            line.waiting,
            len(line.slots.replace(IDLE, "")),
            *line.kv,
            limits.num_kv_blocks,
            position.missing,
            loaded * limits.block_size,
            position.recomputed,
            len(line.loads),
            sum(not decision.load for decision in line.decisions),
            sum(save.saved for save in line.saves),
            *(position.events[name] for name in _EVENTS),
        )

    columns = """
        step epoch began ended prefillTokens decodeTokens drafted accepted forced limit
        delivered waiting scheduled owned fenced cached blocks missing
        loadedTokens recomputedTokens loadsEnded declined savedBlocks
    """
    names = (*columns.split(), *_EVENTS)
    table = np.array([row(position) for position in trace.positions], np.float64).reshape(-1, len(names))
    return {name: np.ascontiguousarray(table[:, index]) for index, name in enumerate(names)}


def cells(trace: TraceContents) -> dict[str, npt.NDArray[np.uint8]]:
    """Return uint8[slots * steps], slot by slot: `cells` of `KINDS`; drafts verified, accepted and forced, if any."""
    sections = {"cells": kinds_of_cells(trace).reshape(-1)}
    if any(position.line.drafted for position in trace.positions):
        numbers = {letter: number for number, letter in enumerate(COUNT_LETTERS)}
        for name in ("drafted", "accepted", "forced"):
            texts = [getattr(position.line, name) for position in trace.positions]
            sections[f"{name}Cells"] = matrix_of_letters(trace, texts, numbers).reshape(-1)
    return sections


def _request_ids(trace: TraceContents) -> list[str]:
    lines = [position.line for position in trace.positions]
    named = [occupancy.request_id for occupancy in trace.occupancies]
    named += [load.request_id for line in lines for load in line.loads]
    named += [decision.request_id for line in lines for decision in line.decisions]
    return list(dict.fromkeys(named))


def _residencies(trace: TraceContents, number: Mapping[str, int]) -> dict[str, npt.NDArray[Any]]:
    rows = [
        (
            occupancy.slot,
            occupancy.gen,
            number[occupancy.request_id],
            max(occupancy.start - trace.first, 0),
            occupancy.end - trace.first,
            occupancy.returned,
            EXITS.index(occupancy.exit),
            occupancy.tokens,
            occupancy.computed,
        )
        for occupancy in sorted(trace.occupancies, key=lambda occupancy: (occupancy.slot, occupancy.start))
    ]
    names = ("Slot", "Gen", "Request", "Start", "End", "Returned", "Exit", "Tokens", "Computed")
    return _named("residency", names, rows, dtype=np.int32)


def _loads(trace: TraceContents, number: Mapping[str, int]) -> dict[str, npt.NDArray[Any]]:
    """Loads: the step that reports each, its times in milliseconds from the start of the trace, and loaded blocks."""
    offsets = trace.offsets()
    loads = [
        (index, offsets[position.epoch], load)
        for index, position in enumerate(trace.positions)
        for load in position.line.loads
    ]
    rows = [
        (index, load.slot, number[load.request_id], load.blocks, load.loaded, load.from_host)
        for index, _, load in loads
    ]
    times = [((offset + load.began) / 1000, (offset + load.ended) / 1000) for _, offset, load in loads]
    names = ("Step", "Slot", "Request", "Blocks", "Loaded", "FromHost")
    return _named("load", names, rows, dtype=np.int32) | _named("load", ("Began", "Ended"), times, dtype=np.float64)


def _decisions(trace: TraceContents, number: Mapping[str, int]) -> dict[str, npt.NDArray[Any]]:
    """Decisions to load or to compute; estimates are milliseconds, NaN if nothing was measured."""
    decisions = [(index, each) for index, position in enumerate(trace.positions) for each in position.line.decisions]
    rows = [
        (index, number[each.request_id], each.load, each.host_blocks, each.store_blocks, each.tokens)
        for index, each in decisions
    ]
    # None becomes NaN.
    estimates = np.array([(each.load_time, each.compute_time) for _, each in decisions], np.float64) / 1000
    names = ("Step", "Request", "Load", "Host", "Store", "Tokens")
    return _named("decision", names, rows, np.int32) | _named("decision", ("LoadTime", "Time"), estimates, np.float64)


def _named(prefix: str, names: Sequence[str], rows: npt.ArrayLike, dtype: npt.DTypeLike) -> dict[str, npt.NDArray[Any]]:
    table = np.array(rows, dtype).reshape(-1, len(names))
    return {f"{prefix}{name}": np.ascontiguousarray(table[:, index]) for index, name in enumerate(names)}


def _joined(sections: dict[str, npt.NDArray[Any]]) -> tuple[bytes, dict[str, tuple[str, int, int]]]:
    """Return the concatenated arrays, each at a multiple of 8 bytes, and (type, offset, length) of each."""
    types = {"float64": "Float64Array", "int32": "Int32Array", "uint8": "Uint8Array"}
    parts: list[bytes] = []
    places: dict[str, tuple[str, int, int]] = {}
    offset = 0
    for name, array in sections.items():
        raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        places[name] = (types[array.dtype.name], offset, array.size)
        raw += bytes(-len(raw) % 8)
        parts.append(raw)
        offset += len(raw)
    return b"".join(parts), places
