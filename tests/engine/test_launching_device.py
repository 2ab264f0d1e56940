"""Engine with an asynchronous pack: plans are launched ahead without any visible difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

import fd_core.engine.device
from fd_core.backends.null import NullBackend
from fd_core.config import SpeculativeConfig
from fd_core.engine.core import Engine
from fd_core.engine.device import DeviceStalled, LaunchingDevice, ThreadDevice, make_device
from fd_core.errors import EngineDead
from fd_core.runner.runner import LaunchedStep, Runner
from fd_core.structured import grammar
from fd_core.types import IntArray, RequestSpec, SamplingParams, StepPlan
from tests.engine.helpers import EOS, golden, null_engine, random_specs, run
from tests.engine.knowing import OracleDrafter
from tests.engine.structured import structured_specs
from tests.runner.queued import NullPack, QueuedModel, QueuedPack, QueuedPostprocess
from tests.runner.test_launching import LIMITS, Plans, prefill_and_decode, queued_runner

SPECS = random_specs(14, seed=31)
BANNED = tuple((token, token * step % 251) for token in range(256) for step in range(1, 9))
READING = [
    *structured_specs(14),
    *(replace(spec, params=replace(spec.params, bad_words_token_ids=BANNED)) for spec in SPECS[:4]),
]
"""Requests whose next tokens depend on their texts."""
MANY = [
    RequestSpec(
        request_id=f"r{index}",
        prompt=(1, 2, index),
        params=SamplingParams(max_tokens=60, ignore_eos=True),
        eos_token_ids=EOS,
    )
    for index in range(16)
]


class DraftingSlots(OracleDrafter):
    """Has drafts, a third of them wrong, for some slots, with `seldom` for half of each text."""

    def __init__(self, specs: list[RequestSpec], slots: int, *, seldom: bool = False) -> None:
        super().__init__(16, specs, wrong=0.3, seed=7)
        self._slots, self._seldom = slots, seldom

    def guess(self, slot: int, limit: int) -> IntArray:
        has = slot < self._slots and not (self._seldom and len(self._known[slot]) % 40 < 20)
        return super().guess(slot, limit if has else 0)


@pytest.fixture
def queued_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[QueuedPack]]:
    """The null backend on an asynchronous pack; `golden` is computed beforehand."""
    golden(SPECS)
    golden(READING)
    golden(MANY)
    packs: list[QueuedPack] = []

    def make_ops(self: NullBackend) -> QueuedPack:
        packs.append(QueuedPack())
        return packs[-1]

    def load_model(self: NullBackend, path: Any, ops: QueuedPack, progress: Any) -> QueuedModel:
        return QueuedModel(257, ops)

    monkeypatch.setattr(NullBackend, "make_ops", make_ops)
    monkeypatch.setattr(NullBackend, "load_model", load_model)
    monkeypatch.setattr("fd_core.runner.builtin.NumpyPostprocess", QueuedPostprocess, raising=False)
    monkeypatch.setattr("fd_core.runner.postprocess.numpy_matrix.NumpyPostprocess", QueuedPostprocess)
    return packs


def watch_launches(engine: Engine) -> list[tuple[bool, bool]]:
    """Record later launches: for each, whether another step is in flight, and whether the step has drafts."""
    device, launches = engine.probe().device, list[tuple[bool, bool]]()
    assert isinstance(device, LaunchingDevice)
    launch = device.runner.launch

    def watched(plan: StepPlan) -> LaunchedStep:
        ahead, launched = bool(device._launched), launch(plan)
        launches.append((ahead, launched.rows.drafted))
        return launched

    device.runner.launch = watched  # type: ignore[method-assign]
    return launches


@pytest.mark.parametrize("blocks", [26, 200])
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.law("1.1", "3.2", "4")
def test_launched_ahead_texts_are_golden(
    queued_backend: list[QueuedPack], blocks: int, depth: int, drafts: int
) -> None:
    """Requests are preempted; with a drafter that seldom has drafts, steps with and without drafts take turns."""
    settings: dict[str, Any] = {"num_kv_blocks": blocks, "pipeline_depth": depth}
    if drafts:
        settings["speculative"] = SpeculativeConfig(method="ngram", num_speculative_tokens=drafts)
    engine = null_engine(**settings)
    if drafts:
        engine.probe().runner.drafter = DraftingSlots(SPECS, 2, seldom=True)
    launches = watch_launches(engine)
    assert run(engine, SPECS).tokens == golden(SPECS)
    stats = engine.stats().scheduler
    assert stats.outputs.stale_outputs == 0
    assert sum(each for each, _ in launches) > 40
    assert ((False, True) in launches) == (drafts > 0)
    assert (True, True) not in launches
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("blocks", [26, 200])
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.law("1.1", "4")
def test_texts_with_late_masks_are_golden(queued_backend: list[QueuedPack], blocks: int, depth: int) -> None:
    """Tokens that a grammar forces after one in flight are verified as drafts, and all of them are kept."""
    engine = null_engine(num_kv_blocks=blocks, pipeline_depth=depth)
    launches = watch_launches(engine)
    assert run(engine, READING).tokens == golden(READING)
    stats = engine.stats()
    assert (True, True) in launches
    assert stats.masks is not None
    assert 0 < stats.masks.forced_accepted == stats.masks.forced_drafted
    assert stats.scheduler.outputs.stale_outputs == 0
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("params", [{"grammar": grammar.regex("[ab]{40}")}, {"bad_words_token_ids": ((97, 98),)}])
def test_row_that_depends_on_its_text_does_not_drain_the_pipeline(
    queued_backend: list[QueuedPack], params: dict[str, Any]
) -> None:
    engine = null_engine(pipeline_depth=2)
    launches = watch_launches(engine)
    for index in range(4):
        own = SamplingParams(max_tokens=40, ignore_eos=True, **(params if index == 0 else {}))
        engine.submit(RequestSpec(request_id=f"r{index}", prompt=(1, 2, 3), params=own, eos_token_ids=EOS))
    while engine.has_work:
        engine.step()
    assert len(launches) >= 40
    assert sum(ahead for ahead, _ in launches) >= len(launches) - 2, "all but the first and the last"
    engine.close()


def test_steps_wait_where_most_grammars_force_tokens(queued_backend: list[QueuedPack]) -> None:
    """As drafts these tokens save more steps than the wait costs."""
    engine = null_engine(pipeline_depth=2)
    launches = watch_launches(engine)
    forcing = SamplingParams(max_tokens=200, grammar=grammar.regex("([ab]cdef){30}"))
    for index in range(4):
        engine.submit(RequestSpec(request_id=f"r{index}", prompt=(1, 2, 3), params=forcing, eos_token_ids=EOS))
    while engine.has_work:
        engine.step()
    assert (False, True) in launches
    assert not any(ahead for ahead, _ in launches[len(launches) // 2 : -2])
    engine.close()


@pytest.mark.parametrize(("drafting", "waits"), [(0, False), (1, False), (8, True)])
def test_steps_wait_where_many_rows_have_drafts(queued_backend: list[QueuedPack], drafting: int, waits: bool) -> None:
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3, cheap_tokens=1000)
    engine = null_engine(pipeline_depth=2, max_num_seqs=16, num_kv_blocks=400, speculative=speculative)
    engine.probe().runner.drafter = DraftingSlots(MANY, drafting)
    launches = watch_launches(engine)
    assert run(engine, MANY).tokens == golden(MANY)
    middle = launches[8:40]
    assert ((False, True) in middle) == waits
    assert (sum(ahead for ahead, _ in middle) < len(middle) / 2) if waits else all(ahead for ahead, _ in middle)
    engine.close()


def test_launch_ahead_depends_on_pack_and_drafter() -> None:
    runner, _ = queued_runner()
    assert isinstance(make_device(runner, 2, "memory"), LaunchingDevice)
    at_once = Runner(NullPack(), QueuedModel(40), LIMITS, QueuedPostprocess)
    device = make_device(at_once, 2, "memory")
    assert isinstance(device, ThreadDevice)
    device.close()


def plans(count: int) -> list[StepPlan]:
    """Return plans with at least one row each, from a seed where none waits for another."""
    return Plans(4, 2).some(count)


def test_failed_launch_is_reported_after_earlier_steps() -> None:
    runner, _ = queued_runner()
    device = LaunchingDevice(runner)
    first, second, third = plans(3)
    device.submit(first)

    def fail(plan: StepPlan) -> Any:
        raise MemoryError("no room")

    runner.launch = fail  # type: ignore[method-assign]
    device.submit(second)
    device.submit(third)
    assert device.collect(5.0).step == first.step
    for _ in range(2):
        with pytest.raises(EngineDead, match=f"step {second.step} failed: MemoryError: no room"):
            device.collect(5.0)
    device.close()


def test_failed_sampling_is_reported_after_earlier_steps() -> None:
    runner, _ = queued_runner()
    device = LaunchingDevice(runner)
    plans = prefill_and_decode(SamplingParams(bad_words_token_ids=((5, 6),)))
    for each in plans:
        device.submit(each)

    def fail(launched: LaunchedStep) -> None:
        raise MemoryError("no room")

    runner.sample = fail  # type: ignore[method-assign]
    device.perform(lambda runner: None)
    assert device.collect(5.0).step == 0
    for _ in range(2):
        with pytest.raises(EngineDead, match="step 1 failed: MemoryError: no room"):
            device.collect(5.0)
    device.close()


def test_step_failing_on_device_fails_later_steps() -> None:
    runner, pack = queued_runner()
    device = LaunchingDevice(runner)
    first, second, _ = plans(3)
    device.submit(first)
    pack.queue(lambda: 1 // 0)
    device.submit(second)
    assert device.collect(5.0).step == first.step
    for _ in range(2):
        with pytest.raises(EngineDead, match=f"step {second.step} failed: ZeroDivisionError"):
            device.collect(5.0)
    device.close()


@pytest.mark.law("1.8")
def test_hung_step_is_detected_and_does_not_block_close() -> None:
    runner, pack = queued_runner()
    device = LaunchingDevice(runner)
    device.submit(plans(1)[0])
    pack.compute = lambda end: None  # type: ignore[method-assign]
    with pytest.raises(DeviceStalled, match=r"did not complete within 0\.05 s"):
        device.collect(0.05)
    device.close()


def test_weight_change_waits_for_launched_steps() -> None:
    runner, pack = queued_runner()
    device = LaunchingDevice(runner)
    device.submit(plans(1)[0])
    assert pack.computed < pack.queued
    device.perform(lambda runner: None)
    assert pack.computed == pack.queued
    assert device.collect(5.0).step == 0
    device.close()


def test_close_waits_for_launched_steps() -> None:
    runner, pack = queued_runner()
    device = LaunchingDevice(runner)
    for plan in plans(2):
        device.submit(plan)
    device.close()
    assert pack.computed == pack.queued


@pytest.mark.law("1.8")
def test_close_does_not_wait_for_a_hung_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fd_core.engine.device, "_CLOSE_SECONDS", 0.05)
    runner, pack = queued_runner()
    device = LaunchingDevice(runner)
    device.submit(plans(1)[0])
    pack.compute = lambda end: None  # type: ignore[method-assign]
    device.close()
