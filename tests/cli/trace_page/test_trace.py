"""The trace page: it contains the trace's data, is self-contained, and shows the rest of a damaged file."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.cli.trace_page.pack import cells, page
from fd_core.engine.process.messages import EngineStats
from fd_core.engine.tracing.perfetto import perfetto_events
from fd_core.engine.tracing.reader import EXITS, KINDS, TraceContents, read_trace
from fd_core.errors import ConfigError
from tests.engine.helpers import null_engine, random_specs
from tests.engine.stepping import greedy
from tests.engine.test_speculation import SPECS, speculating
from tests.tracing.test_writer import stored

ALL = 10**6


def trace_of(path: Path, *, depth: int = 2, abort: str | None = None) -> EngineStats:
    """Write the trace of a run under pressure, with speculation."""
    engine = speculating(3, 0.3, num_kv_blocks=30, pipeline_depth=depth, trace=str(path))
    for spec in SPECS:
        engine.submit(spec)
    while engine.has_work:
        engine.step()
        if abort is not None and engine.stats().scheduler.counters.steps == 10:
            engine.abort([abort])
    engine.close()
    return engine.stats()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EngineStats]:
    path = tmp_path_factory.mktemp("traces") / "run.jsonl"
    return path, trace_of(path)


def unpacked(text: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the input of the page's script: facts and arrays."""
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', text, re.DOTALL)[1])
    blob = zlib.decompress(base64.b64decode(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]))
    types = {"Float64Array": np.float64, "Int32Array": np.int32, "Uint8Array": np.uint8}
    arrays = {
        name: np.frombuffer(blob, types[kind], length, offset)
        for name, (kind, offset, length) in facts["sections"].items()
    }
    return facts, arrays


def fdcore(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_command_writes_one_page_next_to_the_trace(run: tuple[Path, EngineStats]) -> None:
    path, stats = run
    code, output = fdcore(path)
    assert code == 0
    assert f"{stats.scheduler.counters.steps:,} steps" in output
    assert "note:" not in output
    assert path.with_suffix(".html").read_text().startswith("<!doctype html>")


def test_page_is_self_contained(run: tuple[Path, EngineStats]) -> None:
    text = page(read_trace(run[0], ALL), "run")
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|\bsrc\s*=|<link|@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\b", text)
    assert "{facts}" not in text
    assert "/* script */" not in text


def test_page_matches_the_counters(run: tuple[Path, EngineStats]) -> None:
    path, stats = run
    facts, arrays = unpacked(page(read_trace(path, ALL), "run"))
    assert facts["problems"] == []
    assert (facts["numSteps"], facts["numSlots"]) == (stats.scheduler.counters.steps, 8)
    used = arrays["prefillTokens"] + arrays["decodeTokens"] + arrays["drafted"]
    assert used.sum() == stats.scheduler.counters.budget_used
    assert (used <= arrays["limit"]).all()
    assert arrays["delivered"].sum() == stats.scheduler.outputs.generated_tokens
    assert arrays["preempted"].sum() + arrays["late"].sum() == stats.scheduler.counters.preemptions > 0
    assert arrays["returned"].sum() == arrays["preempted"].sum()
    assert arrays["admitted"].sum() == arrays["finished"].sum() == len(SPECS)
    assert (arrays["owned"] + arrays["fenced"] + arrays["cached"] <= arrays["blocks"]).all()
    assert (arrays["drafted"].sum(), arrays["accepted"].sum()) == (
        arrays["draftedCells"].sum(),
        arrays["acceptedCells"].sum(),
    )
    assert np.array_equal(arrays["prefillTokens"].sum(), arrays["chunkTokens"].sum())


@pytest.mark.parametrize("depth", [1, 2])
def test_slot_occupancies_match_cells(tmp_path: Path, depth: int) -> None:
    trace_of(tmp_path / "t", depth=depth)
    read = read_trace(tmp_path / "t", ALL)
    kinds = cells(read)["cells"].reshape(8, -1)
    outside = np.ones_like(kinds, np.bool_)
    for residency in read.occupancies:
        span = kinds[residency.slot, residency.start : residency.end + 1]
        assert outside[residency.slot, residency.start : residency.end + 1].all(), "two residencies in one slot"
        outside[residency.slot, residency.start : residency.end + 1] = False
        assert KINDS.index("idle") not in span
        assert (span == KINDS.index("draining")).sum() == (residency.exit == "preempted")
        assert span[0] in (KINDS.index("prefill"), KINDS.index("decode"))
    left = {KINDS[kind] for kind in np.unique(kinds[outside])}
    assert left <= {"idle", "loading"} | (set() if depth == 1 else {"overrun", "draining"})
    assert {residency.exit for residency in read.occupancies} == {"stop", "length", "preempted"}


def test_abort_is_not_a_preemption(tmp_path: Path) -> None:
    trace_of(tmp_path / "t", abort="r1")
    read = read_trace(tmp_path / "t", ALL)
    assert [residency.exit for residency in read.occupancies if residency.request_id == "r1"] == ["abort"]
    assert sum(position.events["aborted"] for position in read.positions) == 1


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EngineStats]:
    """Write the trace of an engine that loads from a store what another engine saved."""
    folder = tmp_path_factory.mktemp("kept")
    specs = [greedy(f"r{index}", range(index, index + 100), 30) for index in range(4)]
    for name in ("first", "second"):
        engine = stored(folder, trace=str(folder / f"{name}.jsonl"), num_kv_blocks=12, max_model_len=160)
        for spec in specs:
            engine.submit(spec)
        while engine.has_work:
            engine.step()
        engine.close()
    return folder / "second.jsonl", engine.stats()


def test_page_and_terminal_show_loads_and_wait_reasons(kept: tuple[Path, EngineStats]) -> None:
    path, stats = kept
    code, output = fdcore(path)
    assert code == 0
    assert re.search(
        rf"KV outside the device: {stats.scheduler.offload.loads} loads transferred \d+ of \d+ blocks", output
    )
    facts, arrays = unpacked(path.with_suffix(".html").read_text())
    assert facts["problems"] == []
    assert arrays["loadedTokens"].sum() == 16 * arrays["loadLoaded"].sum() == stats.scheduler.offload.loaded_tokens > 0
    assert (
        arrays["decisionLoad"].sum()
        == len(arrays["loadStep"])
        == arrays["loadsEnded"].sum()
        == stats.scheduler.offload.loads
    )
    assert arrays["declined"].sum() == stats.scheduler.offload.declined
    assert (arrays["loadBegan"] <= arrays["loadEnded"]).all()
    assert np.isnan(arrays["decisionLoadTime"][0])
    assert facts["requests"][arrays["decisionRequest"][0]] == "r0"
    assert arrays["recomputedTokens"].sum() <= stats.scheduler.counters.recomputed_tokens


def test_trace_of_the_previous_version_is_read(run: tuple[Path, EngineStats], tmp_path: Path) -> None:
    old = tmp_path / "old.jsonl"
    lines = [json.loads(raw) for raw in run[0].read_bytes().splitlines()]
    lines[0]["fdcore_trace"] = 1
    for line in lines[1:]:
        for name in ("chosen", "loads", "saves"):
            line.pop(name, None)
        line["slots"] = line.get("slots", "").replace("l", ".")
    old.write_text("\n".join(map(json.dumps, lines)) + "\n")
    code, output = fdcore(old)
    assert code == 0
    assert "KV outside" not in output
    assert unpacked(old.with_suffix(".html").read_text())[0]["numSteps"] == run[1].scheduler.counters.steps


def test_text_of_a_trace_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "t"
    name = "</script><script>alert(1)</script>{data}/* script */"
    engine = null_engine(trace=str(path))
    engine.submit(msgspec.structs.replace(random_specs(1, seed=1)[0], request_id=name))
    while engine.has_work:
        engine.step()
    engine.close()
    text = page(read_trace(path, ALL), "<b>{data}")
    assert "<script>alert" not in text
    assert "<b>" not in text
    assert unpacked(text)[0]["requests"] == [name]


def test_last_steps_alone(run: tuple[Path, EngineStats]) -> None:
    path, stats = run
    code, output = fdcore(path, "--last", 20, "--output", path.with_name("few.html"))
    assert code == 0
    assert f"note: This page shows the last 20 of {stats.scheduler.counters.steps:,} steps." in output
    facts, arrays = unpacked(path.with_name("few.html").read_text())
    assert facts["numSteps"] == len(arrays["step"]) == 20
    assert arrays["step"][-1] == stats.scheduler.counters.steps - 1
    assert (arrays["residencyEnd"] >= 0).all()
    assert (arrays["residencyEnd"] < 20).all()


def test_truncated_trace_shows_the_rest(run: tuple[Path, EngineStats], tmp_path: Path) -> None:
    whole = run[0].read_bytes()
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(whole[: whole.index(b'{"step":40,') + 30])
    code, output = fdcore(cut)
    assert code == 0
    assert "The file is truncated in the middle of a line." in output
    assert "no closing line" in output
    assert "damaged" not in output
    facts, _ = unpacked(cut.with_suffix(".html").read_text())
    assert facts["numSteps"] == 40
    assert len(facts["problems"]) == 2


def test_damaged_lines_are_skipped_and_named(run: tuple[Path, EngineStats], tmp_path: Path) -> None:
    lines = run[0].read_bytes().splitlines(keepends=True)
    lines[5] = b"\xff\x00 rubbish\n"
    lines[30] = lines[30].replace(b'"slots":"', b'"slots":"' + b"d" * 99)
    lines[50:53] = []
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes(b"".join(lines))
    read = read_trace(damaged, ALL)
    assert read.problems == [
        "2 damaged lines of the file were skipped.",
        "5 steps are missing from the file.",
    ]
    assert [position.missing for position in read.positions if position.missing] == [1, 1, 3]
    assert len(read.positions) == run[1].scheduler.counters.steps - 5
    assert page(read, "damaged")


def test_header_alone_is_a_page_without_steps(run: tuple[Path, EngineStats], tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    short.write_bytes(run[0].read_bytes().splitlines(keepends=True)[0])
    assert fdcore(short)[0] == 0
    assert unpacked(short.with_suffix(".html").read_text())[0]["numSteps"] == 0


def test_dropped_steps_are_reported_and_slots_cleared(tmp_path: Path) -> None:
    path = tmp_path / "t"
    trace_of(path)
    lines = [json.loads(raw) for raw in path.read_bytes().splitlines()]
    at, gap = 20, 40
    there = [[0, 7, "someone"]]
    lines[at + gap] |= {"dropped": gap, "occupants": there, "slots": "d", "drafted": "", "accepted": "", "chunks": []}
    lines[at + gap] |= {"admitted": [], "taken_back": [], "finished": []}
    del lines[at : at + gap]
    del lines[at + 1 : -1]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    read = read_trace(path, ALL)
    assert read.problems == [f"{gap:,} steps were dropped because the trace writer was too slow."]
    last = len(read.positions) - 1
    assert [(residency.slot, residency.request_id) for residency in read.occupancies if residency.end >= last] == [
        (0, "someone")
    ]
    assert "unknown" in {residency.exit for residency in read.occupancies}
    assert page(read, "t")


def test_epochs_follow_each_other(run: tuple[Path, EngineStats], tmp_path: Path) -> None:
    first = run[0].read_bytes()
    longest = max(read_trace(run[0], ALL).occupancies, key=lambda residency: residency.end - residency.start)
    cut = longest.start + 1
    first = first[: first.index(b'{"step":%d,' % cut)]
    second = run[0].read_bytes().replace(b'"epoch":1', b'"epoch":2', 1)
    both = tmp_path / "both.jsonl"
    both.write_bytes(first + second)
    read = read_trace(both, ALL)
    assert read.problems == []
    assert "engine ended" in {residency.exit for residency in read.occupancies}
    facts, arrays = unpacked(page(read, "both"))
    assert len(facts["headers"]) == 2
    assert np.unique(arrays["epoch"]).tolist() == [0, 1]
    assert (np.diff(arrays["ended"]) >= 0).all()
    assert arrays["began"][cut] >= arrays["ended"][cut - 1]


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is not a trace"),
        (b"GGUF\x03\x00\x00\x00" + bytes(100), "is not a trace"),
        (b'{"a": 1}\n', "is not a trace"),
        (b'{"step":0,"began":1,"ended":2}\n', "is not a trace"),
        (b'{"fdcore_trace":5}\n', "format version 5; supported versions are 1 to 4"),
        (b"[" * 100_000, "is not a trace"),
        (None, "cannot read"),
    ],
)
def test_file_that_is_no_trace_is_a_one_line_error(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_bytes(content)
    code, output = fdcore(path)
    assert code == 2
    assert words in output
    assert len(output.strip().splitlines()) == 1
    assert not path.with_suffix(".html").exists()


def test_page_never_overwrites_the_trace(run: tuple[Path, EngineStats], tmp_path: Path) -> None:
    path = tmp_path / "trace.html"
    path.write_bytes(run[0].read_bytes())
    code, output = fdcore(path)
    assert code == 2
    assert "would replace the trace" in output
    assert path.read_bytes() == run[0].read_bytes()
    assert fdcore(path, "--output", tmp_path / "nowhere" / "page.html")[0] == 2


def test_impossible_number_of_slots_is_rejected(run: tuple[Path, EngineStats], tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(run[0].read_bytes().replace(b'"max_num_seqs":8', b'"max_num_seqs":999999999', 1))
    with pytest.raises(ConfigError, match="has 999999999 slots"):
        read_trace(path, ALL)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_is_shown_or_rejected(data: st.DataObject, run: tuple[Path, EngineStats]) -> None:
    """Bytes replaced, removed or duplicated anywhere: a page and events, or a `ConfigError`, nothing else."""
    raw = bytearray(run[0].read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(raw) - 1))
        size = data.draw(st.integers(0, 400))
        raw[at : at + size] = data.draw(st.sampled_from([b"", b"\n", b"9", b"-1", b'"', raw[at - size : at]]))
    path = run[0].with_name("damaged.jsonl")
    path.write_bytes(raw)
    try:
        read: TraceContents = read_trace(path, ALL)
    except ConfigError as error:
        assert error.exit_code == 2
        return
    facts, arrays = unpacked(page(read, "damaged"))
    assert all((event.dur or 0) >= 0 <= (event.ts or 0) for event in perfetto_events(read))
    assert facts["exits"] == list(EXITS)
    assert len(arrays["cells"]) == facts["numSteps"] * facts["numSlots"]


def test_full_trace_is_reported_on_the_page_and_in_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "full.jsonl"
    engine = null_engine(trace=str(path), trace_limit=5000)
    for spec in SPECS:
        engine.submit(spec)
    while engine.has_work:
        engine.step()
    engine.close()
    code, output = fdcore(path)
    assert code == 0
    facts, _ = unpacked(path.with_suffix(".html").read_text())
    missing = engine.stats().scheduler.counters.steps - facts["numSteps"]
    problem = f"The file reached its limit of 4.9 KiB: {missing:,} later steps are missing."
    assert facts["problems"] == [problem]
    assert problem in output
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b'{"closed"')])
    assert read_trace(path, ALL).problems == [problem.replace(f"{missing:,} later steps", "all later steps")]
