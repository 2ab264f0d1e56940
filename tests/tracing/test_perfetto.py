"""`fdcore trace --format perfetto` writes valid Chrome trace events whose sums match the counters."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from fd_core.effects.operations import Effects, Loaded
from fd_core.engine.process.messages import EngineStats
from fd_core.engine.tracing.perfetto import perfetto_events, perfetto_json
from fd_core.engine.tracing.reader import TraceContents, read_trace
from tests.cli.trace_page.test_trace import fdcore, kept, trace_of  # noqa: F401 - `kept` is a fixture
from tests.engine.test_speculation import SPECS
from tests.tracing.test_kv_operations import Run, load

Event = dict[str, Any]


def events_of(trace: TraceContents) -> list[Event]:
    return json.loads(perfetto_json(trace))["traceEvents"]


def check(events: list[Event]) -> None:
    """Check the rules of the format that viewers rely on."""
    timed = [event for event in events if event["ph"] != "M"]
    assert {event["ph"] for event in events} <= {*"MXiCbesf"}
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert all(type(event["ts"]) is int and event["ts"] >= 0 for event in timed)
    assert all(("dur" in event) <= (event["ph"] == "X") for event in events)
    named = {(event["pid"], event.get("tid")) for event in events if event["ph"] == "M"}
    assert {(event["pid"], event["tid"]) for event in timed if event["ph"] in "Xisf"} <= named
    assert {event["pid"] for event in timed} <= {pid for pid, tid in named if tid is None}
    assert all(type(value) is int for event in timed if event["ph"] == "C" for value in event["args"].values())
    assert all(event["s"] == "t" for event in timed if event["ph"] == "i")
    check_nesting(timed)
    check_pairs(timed)


def check_nesting(timed: list[Event]) -> None:
    """Check that slices of one thread are disjoint or nested."""
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in timed:
        if event["ph"] != "X":
            continue
        ends, end = open_until[event["pid"], event["tid"]], event["ts"] + event.get("dur", 0)
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        assert not ends or end <= ends[-1], event
        ends.append(end)


def check_pairs(timed: list[Event]) -> None:
    """Check that every begin has a later end, and that every flow connects two slices."""
    for begin, end in ("be", "sf"):
        begun = {(event["cat"], event["id"]): event["ts"] for event in timed if event["ph"] == begin}
        ended = {(event["cat"], event["id"]): event["ts"] for event in timed if event["ph"] == end}
        assert begun.keys() == ended.keys()
        assert Counter(event["ph"] for event in timed)[begin] == len(begun), "an id occurs twice"
        assert all(begun[key] <= ended[key] for key in begun)
    slices = [event for event in timed if event["ph"] == "X" and event["cat"] == "residency"]
    for flow in (event for event in timed if event["ph"] in "sf"):
        assert any(
            (flow["pid"], flow["tid"]) == (around["pid"], around["tid"])
            and around["ts"] <= flow["ts"] <= around["ts"] + around.get("dur", 0)
            for around in slices
        )


@pytest.fixture(scope="module", params=[1, 2])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EngineStats]:
    path = tmp_path_factory.mktemp("perfetto") / "run.jsonl"
    return path, trace_of(path, depth=request.param)


def test_trace_under_pressure_is_valid_and_matches_counters(run: tuple[Path, EngineStats]) -> None:
    path, stats = run
    trace = read_trace(path, 10**6)
    events = events_of(trace)
    check(events)
    steps = [event for event in events if event.get("cat") == "step"]
    assert len(steps) == stats.scheduler.counters.steps
    assert sum(event["args"]["budget used"] for event in steps) == stats.scheduler.counters.budget_used
    counted = [event["args"] for event in events if event["name"] == "tokens per step"]
    assert sum(sum(args.values()) for args in counted) == stats.scheduler.counters.budget_used
    prefills = [event["args"]["tokens"] for event in events if event["name"] == "prefill"]
    assert sum(prefills) == sum(args["prefill"] for args in counted) > 0
    residencies = Counter(event["name"] for event in events if event.get("cat") == "residency")
    assert residencies == Counter(span.request_id for span in trace.occupancies)
    instants = Counter(event["name"].partition(":")[0] for event in events if event["ph"] == "i")
    assert instants["finished"] == len(SPECS)
    assert instants["preempted"] == sum(position.events["preempted"] for position in trace.positions) > 0
    assert sum(event["ph"] == "s" for event in events) == instants["preempted"]


def test_slices_of_a_slot_match_its_steps(run: tuple[Path, EngineStats]) -> None:
    """One slice of the matching kind covers each letter of each step."""
    trace = read_trace(run[0], 10**6)
    letters = "".join(position.line.slots for position in trace.positions)
    slices = [event for event in perfetto_events(trace) if event.cat == "slot"]
    steps = Counter[str]()
    for event in slices:
        assert event.args is not None
        steps[event.name] += event.args.get("steps", 1)
    assert steps["prefill"] + steps["decode"] + steps["overrun"] == letters.count("p") + letters.count("d")
    assert steps["draining"] == letters.count("x")


def test_load_has_a_slot_slice_and_a_transfer_slice(kept: tuple[Path, EngineStats]) -> None:  # noqa: F811
    path, stats = kept
    trace = read_trace(path, 10**6)
    events = events_of(trace)
    check(events)
    loads = [event for event in events if event.get("cat") == "load" and event["ph"] == "b"]
    assert len(loads) == stats.scheduler.offload.loads > 0
    assert sum(event["args"]["loaded"] for event in loads) * 16 == stats.scheduler.offload.loaded_tokens
    assert any(event.get("cat") == "save" for event in events)


def test_loading_slot_names_its_waiting_request(tmp_path: Path) -> None:
    writing = Run(tmp_path / "t.jsonl")
    writing.kv.began(Effects((load(1, 2),)))
    writing.step()
    writing.step()
    writing.kv.ended(Loaded(1, 3, 1))
    writing.step()
    writing.lines()
    events = events_of(read_trace(tmp_path / "t.jsonl", 10))
    check(events)
    [waits] = [event for event in events if event.get("cat") == "slot"]
    assert (waits["name"], waits["tid"], waits["args"]) == ("loading r1", 3, {"steps": 2})


def test_epochs_and_missing_steps_split_slices(run: tuple[Path, EngineStats], tmp_path: Path) -> None:
    raw = run[0].read_bytes()
    lines = raw.splitlines(keepends=True)
    path = tmp_path / "two.jsonl"
    path.write_bytes(b"".join(lines[:9] + lines[12:20]) + raw.replace(b'"epoch":1', b'"epoch":2', 1))
    trace = read_trace(path, 10**6)
    assert len(trace.headers) == 2
    check(events_of(trace))
    check(events_of(read_trace(path, 7)))


def test_trace_without_steps_has_no_slices(run: tuple[Path, EngineStats], tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(run[0].read_bytes().splitlines(keepends=True)[0])
    assert {event["ph"] for event in events_of(read_trace(path, 5))} == {"M"}


def test_command_writes_its_file_next_to_the_trace(run: tuple[Path, EngineStats], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(run[0].read_bytes())
    code, output = fdcore(path, "--format", "perfetto")
    assert code == 0, output
    written = json.loads((tmp_path / "run.perfetto.json").read_text())
    assert written["traceEvents"] == events_of(read_trace(path, 10**6))
    assert written["otherData"]["engines"][0]["model"] == "null"
    assert fdcore(path, "--format", "svg")[0] == 2
