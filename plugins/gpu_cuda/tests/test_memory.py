"""The KV cache takes the memory that steps and graphs leave: measured in a rehearsal, or else calculated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from fd_core.config import EngineConfig, Limits, SpeculativeConfig
from fd_core.engine.computing import rehearsed
from fd_core.ops.contract import StepInput
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess
from fd_core.runner.runner import Runner
from fd_core.testing.models.checkpoints import write_checkpoint
from processor import OnProcessor, Processor, make_ops

from fd_gpu_cuda.backend import GRAPH_BYTES, NCCL_BYTES, calculated, measured, step_bytes
from fd_gpu_cuda.graphs import GraphShapes

MIB = 2**20
LIMITS = Limits(
    max_num_seqs=40,
    max_num_batched_tokens=160,
    max_model_len=64,
    block_size=4,
    num_kv_blocks=1000,
    vocab_size=160,
    max_drafts=3,
)


class Metered(Processor):
    """Device whose free memory falls with each capture: per graph, once for shared buffers, once for a library."""

    def __init__(self) -> None:
        super().__init__()
        self.free = 1000 * MIB
        self.held = 0
        self.shared = False

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        replay = super().capture(compute)
        self.held += 3 * MIB + (0 if self.held else 50 * MIB)
        return replay

    def free_on_driver(self) -> int:
        return self.free - self.held

    def release_unused(self) -> None:
        if self.held:
            self.held, self.free = 0, self.free - 7 * MIB  # the library's memory is not freed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def test_memory_is_reserved_for_graphs_that_were_not_captured(folder: Path) -> None:
    device = Metered()
    ops = make_ops(device)
    model = OnProcessor(EngineConfig(model=str(folder))).load_model(folder, ops, lambda done, total: None)
    kept = measured(device, ops, rehearsed(lambda limits: Runner(ops, model, limits, TorchPostprocess), LIMITS))
    assert 2 <= device.captured <= 5
    assert kept.steps == (50 + 3 * device.captured - 7) * MIB
    assert kept.graphs == 3 * MIB * (len(list(GraphShapes.of(LIMITS))) - device.captured)
    assert str(kept) == f"{kept.total // MIB} MiB measured for steps and graphs"
    # Serving captures all of them later.
    ops.configure(LIMITS)
    assert ops.padded(40, 1) == (40, 1)


def test_model_of_transformers_is_not_captured(folder: Path) -> None:
    pytest.importorskip("transformers")
    device = Metered()
    ops = make_ops(device)
    config = EngineConfig(model=str(folder), model_impl="transformers")
    model = OnProcessor(config).load_model(folder, ops, lambda done, total: None)
    with rehearsed(lambda limits: Runner(ops, model, limits, TorchPostprocess), LIMITS):
        assert device.captured == 0


class Weighing(Metered):
    """Device on which the first graphs, those of steps with adapters, take 2 MiB more than others."""

    adapted = 5

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        replay = super().capture(compute)
        self.held += 2 * MIB * (self.captured <= self.adapted)
        return replay


def test_graphs_of_steps_with_adapters_are_measured_too(folder: Path) -> None:
    device = Weighing()
    ops = make_ops(device)
    model = OnProcessor(EngineConfig(model=str(folder))).load_model(folder, ops, lambda done, total: None)
    steps = rehearsed(lambda limits: Runner(ops, model, limits, TorchPostprocess), LIMITS, adapters=True)
    kept = measured(device, ops, steps)
    assert device.captured == 2 * device.adapted
    assert kept.steps == (50 + (5 + 3) * device.adapted - 7) * MIB
    assert kept.graphs == (5 + 3) * MIB * (len(list(GraphShapes.of(LIMITS))) - device.adapted)


def test_rehearsal_runs_the_largest_steps_and_leaves_no_state(folder: Path) -> None:
    ops = make_ops()
    model = OnProcessor(EngineConfig(model=str(folder))).load_model(folder, ops, lambda done, total: None)
    steps: list[StepInput] = []
    runners: list[Runner] = []

    def make(limits: Limits) -> Runner:
        runner = Runner(ops, model, limits, TorchPostprocess)
        runner.watch_forward(steps.append)
        runners.append(runner)
        return runner

    with rehearsed(make, LIMITS):
        assert runners.pop().limits.num_kv_blocks == 16
    assert [len(step.token_ids) for step in steps] == [160, 40, 160]
    assert [len(step.logits_rows) for step in steps] == [40, 40, 160]


class Backed(OnProcessor):
    """Its device has a gibibyte, and rehearses."""

    def make_ops(self) -> Any:
        ops = super().make_ops()
        self.processor.free = 2**30
        return ops


def test_backend_measures_once_and_reserves_the_result(folder: Path) -> None:
    backend = Backed(EngineConfig(model=str(folder)))
    backend.load_model(folder, backend.make_ops(), lambda done, total: None)
    before = backend.free_memory()

    @contextmanager
    def steps() -> Iterator[None]:
        backend.processor.free -= 100 * MIB
        yield
        backend.processor.free += 90 * MIB

    backend.rehearse(steps())
    assert backend.free_memory() == 2**30 - 10 * MIB - 90 * MIB > before
    assert "90 MiB measured for steps and graphs" in backend.describe()


def test_step_that_does_not_fit_raises_memory_error(folder: Path) -> None:
    backend = Backed(EngineConfig(model=str(folder)))
    backend.load_model(folder, backend.make_ops(), lambda done, total: None)

    @contextmanager
    def steps() -> Iterator[None]:
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    with pytest.raises(MemoryError, match="CUDA out of memory"):
        backend.rehearse(steps())


def test_estimate_grows_with_budget_logits_and_drafts(folder: Path) -> None:
    small = step_bytes(tokens=2048, rows=32, hidden=4096, vocabulary=32_000)
    assert 2**29 < step_bytes(tokens=2048, rows=32, hidden=4096, vocabulary=128_256) < 2**30 + 2**28
    assert step_bytes(tokens=8192, rows=32, hidden=4096, vocabulary=32_000) > small
    assert step_bytes(tokens=2048, rows=128, hidden=4096, vocabulary=32_000) > small
    config = EngineConfig(model=str(folder), max_num_batched_tokens=64, max_num_seqs=8)
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    drafting = EngineConfig(model=str(folder), max_num_batched_tokens=64, max_num_seqs=8, speculative=speculative)
    backend = Backed(config)
    model = backend.load_model(folder, backend.make_ops(), lambda done, total: None)
    assert calculated(drafting, model, {}).steps > calculated(config, model, {}).steps
    assert calculated(config, None, {}).total == GRAPH_BYTES
    ranks = EngineConfig(model=str(folder), tensor_parallel_size=2)
    assert calculated(ranks, None, {}).total == GRAPH_BYTES + NCCL_BYTES


def test_no_memory_is_left_if_the_reserve_does_not_fit(folder: Path) -> None:
    backend = Backed(EngineConfig(model=str(folder)))
    backend.load_model(folder, backend.make_ops(), lambda done, total: None)
    backend.processor.free = 2**20
    assert backend.free_memory() == 0


def test_default_sizes_are_halved_until_steps_leave_memory_for_kv(folder: Path) -> None:
    backend = Backed(EngineConfig(model=str(folder)))
    backend.load_model(folder, backend.make_ops(), lambda done, total: None)
    reserved = []
    for halvings in range(5):
        backend.halvings = halvings
        reserved.append(backend.reserved_memory)
    assert reserved[0] > reserved[1] > reserved[2] > reserved[3] == reserved[4]
    assert backend.default_sizes == {
        "default_pipeline_depth": 2,
        "default_batched_tokens": 2048,
        "default_num_seqs": 32,
    }
