"""A trace derives from effects and completions alone which slots load KV, and for which requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fd_core.config import Limits
from fd_core.effects.operations import Cancel, Effects, Fetch, Fetched, Load, Loaded, Save, Saved
from fd_core.engine.tracing.format import StepLine, TraceHeader
from fd_core.engine.tracing.writer import TraceWriter
from fd_core.scheduling.contract import SchedulerHoldings
from fd_core.types import PrefillJob, StepOutput, StepPlan
from tests.tracing.test_writer import lines_of

LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=16, num_kv_blocks=16, vocab_size=100
)
NOTHING = np.empty(0, np.int32)
BLOCKS = np.arange(3, dtype=np.int32)
KEYS = (b"a", b"b", b"c")


class Run:
    """A trace whose steps compute nothing."""

    def __init__(self, path: Path) -> None:
        header = TraceHeader(model="m", backend="b", device="d", epoch=1, started=0.0, speculation=None, limits=LIMITS)
        self._path = path
        self._writer = TraceWriter(path, header, 1 << 20, nanoseconds=lambda: 0)
        self._steps = 0
        self.kv = self._writer.kv

    def step(self) -> None:
        plan = StepPlan(1, self._steps, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING.astype(np.bool_))
        output = StepOutput(1, self._steps, np.full((4, 1), -1, np.int32), np.zeros(4, np.int32))
        self._writer.step_ended(0, plan, output, [], SchedulerHoldings())
        self._steps += 1

    def lines(self) -> list[StepLine]:
        self._writer.close(0)
        return lines_of(self._path)[1]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "t.jsonl")


def load(operation: int, slot: int) -> Load:
    return Load(operation, KEYS, BLOCKS, slot, f"r{operation}")


def test_slot_is_loading_from_effect_to_completion(run: Run) -> None:
    run.kv.began(Effects((load(1, 2),)))
    run.step()
    run.kv.ended(Loaded(1, 2, 1))
    run.step()
    first, second = run.lines()
    assert (first.slots, first.loads, second.slots) == ("..l", (), "")
    [entry] = second.loads
    assert (entry.slot, entry.request_id, entry.blocks, entry.loaded, entry.from_host) == (2, "r1", 3, 2, 1)


def test_slot_of_aborted_load_is_reused_by_next_request(run: Run) -> None:
    """The blocks of an aborted load stay allocated until its completion; the slot is free at once."""
    run.kv.began(Effects((load(1, 0),)))
    run.kv.began(
        Effects(
            (
                Cancel(1),
                Cancel(1),
            )
        )
    )
    run.step()
    run.kv.began(Effects((load(2, 0),)))
    run.kv.ended(Loaded(1, 0))
    run.step()
    run.kv.ended(Loaded(2, 3))
    run.step()
    lines = run.lines()
    assert [line.slots for line in lines] == ["", "l", ""]
    assert [[entry.request_id for entry in line.loads] for line in lines] == [[], ["r1"], ["r2"]]


@pytest.mark.parametrize("outcome, loaded", [("transferred", 3), ("lost", 0)])
def test_fetch_from_prefill_worker_is_a_load(run: Run, outcome: str, loaded: int) -> None:
    run.kv.began(Effects((Fetch(7, "host:1", PrefillJob(b"", 0), BLOCKS, slot=1, request_id="far"),)))
    run.step()
    run.kv.ended(Fetched(7, outcome))  # type: ignore[arg-type]
    run.step()
    first, second = run.lines()
    assert first.slots == ".l"
    assert [(entry.request_id, entry.blocks, entry.loaded) for entry in second.loads] == [("far", 3, loaded)]


def test_saves_are_traced_and_unknown_completions_ignored(run: Run) -> None:
    run.kv.began(
        Effects(
            (
                Save(3, KEYS, BLOCKS, True),
                Cancel(99),
            )
        )
    )
    for completion in (Saved(3, 2), Saved(4, 1), Loaded(5, 1), Fetched(6, "lost")):
        run.kv.ended(completion)
    run.step()
    [line] = run.lines()
    assert [(entry.blocks, entry.saved) for entry in line.saves] == [(3, 2)] and line.loads == ()
