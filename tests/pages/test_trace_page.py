"""The page of a trace: its script runs in node, on the trace of a real engine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fd_core.cli.trace_page.pack import page
from fd_core.engine.tracing.reader import read_trace
from tests.engine.helpers import null_engine, run
from tests.engine.stepping import greedy
from tests.engine.structured import structured_specs
from tests.pages.playing import needs_node, play

pytestmark = needs_node


def test_page_names_slots_and_requests_apart_and_folds_empty_slots(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = null_engine(max_num_seqs=16, num_kv_blocks=200, max_num_batched_tokens=1024, trace=str(path))
    specs = [*structured_specs(4), *(greedy(str(index), range(index, index + 9), 60) for index in range(4))]
    # As a server makes them: ids that begin and end alike.
    named = [msgspec.structs.replace(spec, request_id=f"chatcmpl-{n}f00d.{n}.0") for n, spec in enumerate(specs)]
    run(engine, named)
    masks = engine.stats().masks
    engine.close()
    assert masks is not None and masks.forced_accepted > 0
    trace = read_trace(path, 10**6)
    held = sorted({occupancy.slot for occupancy in trace.occupancies})
    shown = play(tmp_path, page(trace, "run"), "trace")
    assert shown["pressed"] == [False, f"{16 - len(held)} empty slots", "false"]
    for words, slots in ((shown["folded"], held), (shown["all"], range(16)), (shown["again"], held)):
        assert [word for word in words if word.startswith("slot ")] == [f"slot {slot}" for slot in slots]
    labels = [word for word in shown["folded"] if "f00d" in word or word.startswith("…")]
    assert len(labels) == len(set(labels)) >= 4, "no two requests have the same label"
    assert shown["tip"].startswith(f"slot {held[1]}: ")
    assert ["tokens forced by grammars", str(masks.forced_accepted)] in shown["figures"]
    assert not [name for name, _ in shown["figures"] if name == "drafts accepted"], "there was no drafter"
    [head] = [text for text in shown["heads"] if text.startswith("Speculation")]
    assert "accepted drafts" in head and "tokens forced by grammars" in head and "rejected drafts" in head
