"""The trace is accurate, never blocks the engine loop, and never harms the engine when it fails."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.engine.tracing import format as trace_format
from fd_core.engine.tracing import writer
from fd_core.engine.tracing.format import StepLine
from fd_core.engine.tracing.writer import StepRecord, line_of
from fd_core.errors import ConfigError
from fd_core.scheduling.contract import SchedulerHoldings
from fd_core.types import Admission, Delta, FinishReason, Revocation, SamplingParams, StepOutput, StepPlan
from tests.engine.helpers import golden, null_engine, random_specs, run
from tests.engine.stepping import greedy
from tests.engine.structured import structured_specs
from tests.engine.test_speculation import SPECS, speculating


def lines_of(path: Path) -> tuple[list[dict], list[StepLine], list[dict]]:
    """Return the header, the steps and the closing line of a file without other lines."""
    headers, steps, ends = [], [], []
    for raw in path.read_bytes().splitlines():
        if raw.startswith(b'{"step"'):
            steps.append(msgspec.json.decode(raw, type=StepLine))
        elif raw:
            value = json.loads(raw)
            (headers if "fdcore_trace" in value else ends).append(value)
    return headers, steps, ends


def total(letters: str) -> int:
    return sum(trace_format.COUNT_LETTERS.index(letter) for letter in letters)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.jsonl"


@pytest.fixture
def sleepy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the writer thread idle until its engine is closed."""
    monkeypatch.setattr(writer, "_WRITE_SECONDS", 3600.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_trace_matches_counters_under_preemption_and_speculation(path: Path, depth: int) -> None:
    engine = speculating(3, 0.3, num_kv_blocks=30, pipeline_depth=depth, trace=str(path))
    assert run(engine, SPECS).tokens == golden(SPECS)
    engine.close()
    stats = engine.stats()
    [header], steps, [end] = lines_of(path)
    assert header["fdcore_trace"] == 4
    assert (header["model"], header["backend"], header["epoch"]) == ("null", "null", 1)
    assert header["limits"]["max_num_batched_tokens"] == 64
    assert abs(header["started"] - time.time()) < 60
    assert [line.step for line in steps] == list(range(stats.scheduler.counters.steps))
    assert sum(line.budget for line in steps) == stats.scheduler.counters.budget_used
    assert max(line.budget for line in steps) <= 64
    assert sum(line.delivered for line in steps) == stats.scheduler.outputs.generated_tokens
    assert sum(len(line.revoked) for line in steps) == stats.scheduler.counters.preemptions > 0
    assert len(SPECS) < sum(len(line.admitted) for line in steps) <= len(SPECS) + stats.scheduler.counters.preemptions
    # With two steps in flight, some drafts are computed for a finished request; the counters exclude them.
    drafted, accepted = (sum(total(getattr(line, name)) for line in steps) for name in ("drafted", "accepted"))
    assert drafted == stats.scheduler.drafts.proposed if depth == 1 else drafted >= stats.scheduler.drafts.proposed
    assert 0 < stats.scheduler.drafts.accepted <= accepted < drafted
    assert sorted(ended.request_id for line in steps for ended in line.finished) == sorted(golden(SPECS))
    got = {ended.request_id: ended.tokens for line in steps for ended in line.finished}
    assert got == {name: len(tokens) for name, tokens in golden(SPECS).items()}
    arrivals = [arrival for line in steps for arrival in line.arrived]
    assert [(arrival.request_id, arrival.tokens) for arrival in arrivals] == [
        (spec.request_id, len(spec.prompt)) for spec in SPECS
    ]
    assert all(sum(line.kv) <= 30 for line in steps)
    assert max(line.kv[0] for line in steps) > 20
    assert max(line.waiting for line in steps) > 0
    assert steps[-1].kv[:2] == (0, 0)
    assert end == {"closed": end["closed"], "dropped": 0}
    times = [moment for line in steps for moment in (line.began, line.ended)]
    assert times == sorted(times)


def test_every_scheduled_slot_has_a_letter(path: Path) -> None:
    engine = null_engine(num_kv_blocks=30, trace=str(path))
    run(engine, random_specs(12, seed=1))
    engine.close()
    for line in lines_of(path)[1]:
        chunks = dict(line.chunks)
        assert [slot for slot, letter in enumerate(line.slots) if letter == trace_format.PREFILL] == sorted(chunks)
        assert line.slots.count(trace_format.DRAINING) == len(line.revoked)
        assert line.budget == sum(chunks.values()) + line.slots.count(trace_format.DECODE) + total(line.drafted)


@pytest.mark.parametrize("depth", [1, 2])
def test_trace_separates_forced_tokens_from_drafts(path: Path, depth: int) -> None:
    engine = speculating(3, 0.3, pipeline_depth=depth, trace=str(path))
    run(engine, [*SPECS, *structured_specs(12)])
    engine.close()
    masks, steps = engine.stats().masks, lines_of(path)[1]
    assert masks is not None
    forced = [letters(line.forced) for line in steps]
    assert sum(map(sum, forced)) == masks.forced_accepted > 0
    for line, counts in zip(steps, forced, strict=True):
        accepted = letters(line.accepted)
        assert all(count <= accepted[slot] for slot, count in enumerate(counts) if count)
    assert sum(map(sum, forced)) < sum(total(line.accepted) for line in steps), "drafts of the drafter are the others"


def letters(text: str) -> list[int]:
    return [trace_format.COUNT_LETTERS.index(letter) for letter in text]


def test_trace_contains_no_tokens() -> None:
    secret = np.array([1234567, 7654321], np.int32)
    plan = StepPlan(
        epoch=1,
        step=4,
        slots=np.array([2, 0], np.int32),
        gens=np.array([3, 1], np.int32),
        starts=np.array([0, 5], np.int32),
        num_tokens=np.array([2, 3], np.int32),
        num_drafts=np.array([0, 2], np.int32),
        samples=np.array([True, True]),
        admissions=(Admission(2, 3, secret, 2, SamplingParams(), (1234567,), 0, "a"),),
        revocations=(Revocation(1, 9),),
    )
    tokens = np.array([[1234567, 7654321, -1], [-9, -1, -1], [1234567, -1, -1], [-1, -1, -1]], np.int32)
    forced = np.array([1, 0, 0, 7], np.int32)
    output = StepOutput(1, 4, tokens, np.array([1, 9, 3, 0], np.int32), forced=forced)
    deltas = (Delta("a", (1234567,), FinishReason.STOP), Delta("b", (7654321,)))
    line = line_of(StepRecord(10, 20, plan, output, deltas, SchedulerHoldings(waiting=5, owned=1, fenced=2, cached=3)))
    assert line == StepLine(
        step=4,
        began=10,
        ended=20,
        budget=5,
        delivered=2,
        waiting=5,
        kv=(1, 2, 3),
        slots="dxp",
        drafted="2",
        accepted="1",
        forced="1",
        chunks=((2, 2),),
        admitted=(trace_format.AdmissionEntry(2, 3, "a", 2, 0),),
        revoked=((1, 9),),
        finished=(trace_format.FinishEntry("a", FinishReason.STOP),),
    )
    encoded = msgspec.json.encode(line)
    assert b"1234567" not in encoded
    assert b"7654321" not in encoded


def test_slot_that_loads_kv_has_its_own_letter() -> None:
    plan = StepPlan(
        epoch=1,
        step=0,
        slots=np.array([1], np.int32),
        gens=np.array([1], np.int32),
        starts=np.array([5], np.int32),
        num_tokens=np.array([1], np.int32),
        num_drafts=np.array([0], np.int32),
        samples=np.array([True]),
    )
    output = StepOutput(1, 0, np.full((4, 1), -1, np.int32), np.ones(4, np.int32))
    loading = (0, 1, 3)
    kept = (trace_format.SaveEntry(1, 3, 2, 2), trace_format.LoadEntry(2, 9, 0, "a", 3, 2, 1))
    line = line_of(StepRecord(1, 2, plan, output, (), SchedulerHoldings(), loading=loading, kv_entries=kept))
    assert line.slots == "ld.l"
    assert (line.saves, line.loads, line.decisions) == (kept[:1], kept[1:], ())


def stored(folder: Path, **settings: object) -> Engine:
    secret = folder / "secret"
    secret.write_bytes(b"of sixteen bytes")
    secret.chmod(0o600)
    return null_engine(kv_store=f"disk:{folder / 'kv'}", kv_store_secret_file=str(secret), **settings)


def test_trace_records_decisions_loads_and_saves(tmp_path: Path, path: Path) -> None:
    specs = [greedy(f"r{index}", range(index, index + 100), 30) for index in range(4)]
    first = stored(tmp_path)
    run(first, specs)
    first.close()
    second = stored(tmp_path, trace=str(path), num_kv_blocks=12, max_model_len=160)
    assert run(second, specs).tokens == golden(specs)
    second.close()
    stats = second.stats()
    _, steps, _ = lines_of(path)
    decisions = [decision for line in steps for decision in line.decisions]
    loads = [load for line in steps for load in line.loads]
    assert len([decision for decision in decisions if decision.load]) == len(loads) == stats.scheduler.offload.loads
    assert {decision.request_id for decision in decisions} == {spec.request_id for spec in specs}
    assert (decisions[0].store_blocks, decisions[0].tokens, decisions[0].load_time) == (6, 96, None)
    assert sum(load.loaded for load in loads) * 16 == stats.scheduler.offload.loaded_tokens > 0
    assert stats.kv is not None
    assert sum(load.from_host for load in loads) == stats.kv.loaded_blocks_host
    assert all(0 < load.began <= load.ended <= steps[-1].ended for load in loads)
    saves = [save for line in steps for save in line.saves]
    # Completions after the last step are not traced.
    assert 0 < sum(save.saved for save in saves) * 16 <= stats.scheduler.offload.saved_tokens
    assert all(save.began <= save.ended for save in saves)


def test_without_trace_no_thread_and_no_file(tmp_path: Path) -> None:
    engine = null_engine()
    run(engine, SPECS[:2])
    assert "fdcore-trace" not in [thread.name for thread in threading.enumerate()]
    engine.close()


@pytest.mark.timing
def test_step_is_written_within_half_a_second(path: Path) -> None:
    engine = null_engine(trace=str(path))
    engine.submit(SPECS[1])
    engine.step()
    deadline = time.monotonic() + 0.5
    while not lines_of(path)[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [line.step for line in lines_of(path)[1]] == [0]
    engine.close()


class StuckFile:
    """A file on a disk that does not respond."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()

    def write(self, data: bytes) -> None:
        self.reached.set()
        self.released.wait(60)

    def flush(self) -> None: ...


def test_stuck_disk_does_not_block_the_loop(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MAX_QUEUED", 5)
    engine = null_engine(trace=str(path))
    assert engine._trace is not None
    run(engine, SPECS[3:4])
    while not lines_of(path)[1]:
        time.sleep(0.001)  # until the writer is blocked on its file
    header, file = engine._trace._file, StuckFile()
    engine._trace._file = file  # type: ignore[assignment]
    try:
        run(engine, SPECS[4:5])
        assert file.reached.wait(60)  # from here on the writer drains nothing from its queue
        assert run(engine, SPECS[:3]).tokens == golden(SPECS[:3])
        assert engine._trace._dropped > 10
    finally:
        file.released.set()
        engine.close()
    assert header.closed


def test_dropped_steps_are_counted_and_occupants_restated(
    path: Path, sleepy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_MAX_QUEUED", 5)
    engine = null_engine(trace=str(path))
    for spec in SPECS[1:5]:
        engine.submit(spec)

    def steps(count: int) -> None:
        for _ in range(count):
            engine.step()

    steps(12)
    assert engine._trace is not None
    engine._trace._drain()
    there = {
        request.spec.request_id for request in engine.probe().scheduler.probe().slots.requests if request is not None
    }
    steps(9)
    engine.close()
    _, lines, [end] = lines_of(path)
    assert [line.step for line in lines] == [0, 1, 2, 3, 4, 12, 13, 14, 15, 16]
    assert [line.dropped for line in lines] == [0, 0, 0, 0, 0, 7, 0, 0, 0, 0]
    assert {stay.request_id for stay in lines[5].occupants} == there
    assert end["dropped"] == 4


def test_disk_failure_ends_the_trace_and_not_the_engine(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = null_engine(trace=str(path))
    assert engine._trace is not None
    engine._trace._file.close()
    with caplog.at_level(logging.WARNING):
        assert run(engine, SPECS[:3]).tokens == golden(SPECS[:3])
        engine.close()
    assert "tracing stopped: cannot write" in caplog.text
    assert len(engine._trace._queue) == 0


def test_file_that_is_no_trace_is_never_overwritten(tmp_path: Path) -> None:
    precious = tmp_path / "model.gguf"
    precious.write_bytes(b"GGUF and more")
    with pytest.raises(ConfigError, match="exists and is not a trace"):
        null_engine(trace=str(precious))
    assert precious.read_bytes() == b"GGUF and more"
    with pytest.raises(ConfigError, match="is not a file"):
        null_engine(trace=str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot write .*: no such file or directory") as caught:
        null_engine(trace=str(tmp_path / "nowhere" / "t.jsonl"))
    assert (caught.value.field, caught.value.exit_code) == ("--trace", 2)


def traced(path: Path, epoch: int, **settings: int) -> Engine:
    config = EngineConfig(
        model="null", backend="null", max_model_len=400, num_kv_blocks=40, trace=str(path), **settings
    )
    return load_engine(config, None, epoch=epoch, progress=lambda *_: None)


def test_restart_appends_and_new_engine_starts_a_new_trace(path: Path) -> None:
    engine = traced(path, 1)
    run(engine, SPECS[:2])
    engine.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    engine = traced(path, 2)
    run(engine, SPECS[2:4])
    engine.close()
    assert path.read_bytes().startswith(whole[: len(whole) // 2] + b'\n{"fdcore_trace"')
    traced(path, 1).close()
    headers, steps, _ = lines_of(path)
    assert ([header["epoch"] for header in headers], steps) == ([1], [])


def test_close_is_idempotent(path: Path) -> None:
    engine = null_engine(trace=str(path))
    engine.close()
    engine.close()
    assert len(lines_of(path)[2]) == 1


def test_steps_before_a_crash_are_in_the_file(path: Path) -> None:
    script = f"""
from tests.engine.helpers import null_engine, random_specs
engine = null_engine(trace={str(path)!r})
engine.submit(random_specs(2, seed=5)[1])
for _ in range(7):
    engine.step()
raise SystemExit("crashed")
"""
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, timeout=60, check=False)
    assert b"crashed" in ended.stderr
    _, steps, ends = lines_of(path)
    assert (len(steps), ends) == (7, [])


def test_trace_names_the_drafter(path: Path) -> None:
    null_engine(trace=str(path), speculative=SpeculativeConfig(method="ngram")).close()
    assert lines_of(path)[0][0]["speculation"] == "ngram"


def test_trace_stays_below_its_limit_and_reports_omissions(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = null_engine(trace=str(path), trace_limit=4000)
    with caplog.at_level(logging.WARNING):
        assert run(engine, SPECS).tokens == golden(SPECS)
        engine.close()
    assert 3000 < path.stat().st_size <= 4000
    [_], steps, [full, end] = lines_of(path)
    assert full == {"full": 4000}
    assert [line.step for line in steps] == list(range(len(steps)))
    assert len(steps) > 2
    assert end["dropped"] == engine.stats().scheduler.counters.steps - len(steps)
    assert path.read_bytes().splitlines()[-2] == b'{"full":4000}'
    assert caplog.text.count("reached its limit of 3.9 KiB") == 1


def test_restart_loop_does_not_fill_the_disk(path: Path) -> None:
    for epoch in range(1, 30):
        engine = traced(path, epoch, trace_limit=4000)
        run(engine, SPECS[:2])
        engine.close()
    assert path.stat().st_size <= 4000
    headers, _, _ = lines_of(path)
    assert [header["epoch"] for header in headers] == list(range(1, len(headers) + 1))
    assert len(headers) < 10


@pytest.mark.parametrize("limit", [1, 700, 1000, 1300])
def test_any_limit_leaves_a_header_and_whole_lines(path: Path, limit: int) -> None:
    engine = null_engine(trace=str(path), trace_limit=limit)
    run(engine, SPECS[:2])
    engine.close()
    [header], steps, ends = lines_of(path)
    assert header["epoch"] == 1
    assert len(ends) == 2
    assert len(steps) + ends[1]["dropped"] == engine.stats().scheduler.counters.steps
