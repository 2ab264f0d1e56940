"""Outputs are the same over every transport; a runner that fails or stalls is an engine fault."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.engine.device import Device, SocketDevice, ThreadDevice
from fd_core.engine.process.messages import EngineStats, decode_output, encode_output
from fd_core.errors import EngineDead
from fd_core.ops.compilations import CompilationStats
from fd_core.ops.contract import Ops
from fd_core.types import LogprobRows, StepOutput, StepPlan
from fd_core.types.metrics import read_metrics
from tests.engine.helpers import golden, null_engine, random_specs, run

SPECS = random_specs(12, seed=23)


@st.composite
def outputs(draw: st.DrawFn) -> StepOutput:
    slots, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scores = None
    if draw(st.booleans()):
        rows, top = draw(st.integers(1, 4)), draw(st.integers(0, 3))
        scores = LogprobRows(
            slots=rng.integers(0, slots, rows, np.int32),
            columns=rng.integers(0, width, rows, np.int32),
            chosen=rng.random(rows, np.float32),
            top_ids=rng.integers(0, 99, (rows, top), np.int32),
            top=rng.random((rows, top), np.float32),
        )
    return StepOutput(
        epoch=draw(st.integers(0, 9)),
        step=draw(st.integers(0, 2**40)),
        tokens=rng.integers(-9, 99, (slots, width), np.int32),
        gens=rng.integers(0, 99, slots, np.int32),
        drafts_ready=draw(st.sampled_from([None, np.arange(slots, dtype=np.int32)])),
        logprobs=scores,
        errors=tuple(draw(st.lists(st.tuples(st.integers(0, 4), st.text()), max_size=2))),
    )


PAUSED = """
import os, signal, sys, time
import numpy as np
from fd_core.engine import device
from fd_core.types import StepOutput

class Runner:
    def announce(self, plan): pass
    def execute(self, plan):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.05)
        return StepOutput(1, plan, np.zeros((1, 1), np.int32), np.zeros(1, np.int32))

made = getattr(device, sys.argv[1])(Runner())
made.submit(3)
print(made.collect(1.0).step)
made.close()
"""


@pytest.mark.parametrize("made", [ThreadDevice, SocketDevice])
def test_suspended_process_does_not_trip_step_timeout(made: type[Device]) -> None:
    """The clock runs on while the machine or all of its processes are suspended."""
    command = [sys.executable, "-c", PAUSED, made.__name__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while " T " not in Path(f"/proc/{process.pid}/stat").read_text():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(1.2)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0] == "3\n"


@given(outputs())
def test_frame_preserves_output_bitwise(output: StepOutput) -> None:
    back = decode_output(encode_output(output))
    assert isinstance(back, StepOutput)
    np.testing.assert_equal(_plain(back), _plain(output))


@pytest.mark.parametrize("transport", ["memory", "zmq"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_texts_and_logprobs_are_equal_over_each_transport(transport: str, depth: int) -> None:
    engine = null_engine(num_kv_blocks=30, pipeline_depth=depth, output_transport=transport)
    assert run(engine, SPECS).tokens == golden(SPECS)
    assert engine.stats().scheduler.outputs.stale_outputs == 0
    engine.close()


def test_failure_frame_carries_reason_and_rank() -> None:
    back = decode_output(encode_output(EngineDead("rank 1 is gone", field="rank 1")))
    assert isinstance(back, EngineDead)
    assert (back.message, back.field) == ("rank 1 is gone", "rank 1")


@given(st.binary(max_size=60))
def test_malformed_frame_is_rejected(data: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, ValueError)):
        decode_output(data)


class _FaultyRunner:
    def __init__(self) -> None:
        self.go_on = threading.Event()

    def announce(self, plan: StepPlan) -> None:
        pass

    def execute(self, plan: StepPlan) -> StepOutput:
        self.go_on.wait(60)
        raise ValueError("the device is on fire")


def _empty_plan() -> StepPlan:
    nothing = np.empty(0, np.int32)
    return StepPlan(1, 0, nothing, nothing, nothing, nothing, nothing, nothing.astype(np.bool_))


@pytest.mark.parametrize("kind", [ThreadDevice, SocketDevice])
def test_failed_runner_is_reported_with_reason(kind: type[Device]) -> None:
    device = kind(runner := _FaultyRunner())  # type: ignore[call-arg]
    runner.go_on.set()
    device.submit(_empty_plan())
    with pytest.raises(EngineDead, match="step 0 failed: ValueError: the device is on fire"):
        device.collect(60.0)
    device.close()


@pytest.mark.parametrize("kind", [ThreadDevice, SocketDevice])
@pytest.mark.law("1.8")
def test_stalled_runner_is_detected(kind: type[Device]) -> None:
    device = kind(runner := _FaultyRunner())  # type: ignore[call-arg]
    device.submit(_empty_plan())
    with pytest.raises(EngineDead, match=r"did not complete within 0\.05 s"):
        device.collect(0.05)
    runner.go_on.set()
    device.close()


def _plain(output: StepOutput) -> dict[str, object]:
    fields = {name: getattr(output, name) for name in StepOutput.__slots__}
    if output.logprobs is not None:
        fields["logprobs"] = {name: getattr(output.logprobs, name) for name in LogprobRows.__slots__}
    return fields


def test_compilation_stats_only_for_packs_that_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = null_engine()
    assert engine.stats().compilations is None
    counted = CompilationStats(start=7, serving=1, start_seconds=2.5, serving_seconds=0.5)
    monkeypatch.setattr(Ops, "compilation_stats", lambda ops: counted)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(engine.stats()), type=EngineStats)
    assert decoded.compilations == counted
    samples = {(spec.name, *each): value for spec, found in read_metrics(decoded) for each, value in found}
    assert samples["kernel_compilations", "start"] == 7
    assert samples["kernel_compilation_seconds", "serving"] == 0.5
    engine.close()
