"""Whole steps with the CPU as the device: graphs, padding, waits, memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fd_core.backends.contract import Model  # noqa: E402 - only where torch is installed
from fd_core.config import EngineConfig, Limits, resolve_limits  # noqa: E402
from fd_core.engine.device import LaunchingDevice, ThreadDevice, make_device  # noqa: E402
from fd_core.ops.contract import Ops  # noqa: E402
from fd_core.ops.numpy.ops import NumpyOps  # noqa: E402
from fd_core.ops.torch.ops import TorchOps  # noqa: E402
from fd_core.runner.inputs.inputs import BudgetExceeded  # noqa: E402
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess  # noqa: E402
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess  # noqa: E402
from fd_core.runner.runner import Runner  # noqa: E402
from fd_core.testing.models.checkpoints import write_checkpoint  # noqa: E402
from fd_core.types import Admission, BlockGrant, Revocation, SamplingParams, StepPlan  # noqa: E402
from processor import OnProcessor, Processor, ids, make_ops, nothing_waits  # noqa: E402

from fd_gpu_cuda.backend import calculated  # noqa: E402
from fd_gpu_cuda.kernel_table import SamplingKernels  # noqa: E402
from fd_gpu_cuda.ops import CudaOps  # noqa: E402

LIMITS = Limits(
    max_num_seqs=6, max_num_batched_tokens=40, max_model_len=40, block_size=4, num_kv_blocks=60, vocab_size=160
)
CASES = ("llama", "qwen3-moe", "gemma3")


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, place)
    return place


def load(folder: Path, ops: Ops) -> Model:
    return OnProcessor(EngineConfig(model=str(folder))).load_model(folder, ops, lambda done, total: None)


def plan(step: int, rows: list[tuple[int, int, int]], sampling: list[bool] | None = None, **more: Any) -> StepPlan:
    """A plan of (slot, start, tokens) rows."""
    slots, starts, counts = (ids(*column) for column in zip(*rows, strict=True)) if rows else (ids(), ids(), ids())
    samples = np.array([True] * len(rows) if sampling is None else sampling, np.bool_)
    zeros = np.zeros(len(rows), np.int32)
    return StepPlan(1, step, slots, zeros + 1, starts, counts, zeros, samples, **more)


def admission(slot: int, prompt: int, **params: Any) -> Admission:
    tokens = np.random.default_rng(slot).integers(0, 160, prompt, np.int32)
    return Admission(slot, 1, tokens, prompt, SamplingParams(**params), (), 0)


def conversation(params: list[dict[str, Any]], decodes: int = 5) -> list[StepPlan]:
    """Prefill in one step, then decode; slots leave one after the other."""
    lengths = [3 + 2 * slot for slot in range(len(params))]
    admissions = tuple(
        admission(slot, length, **own) for slot, (length, own) in enumerate(zip(lengths, params, strict=True))
    )
    grants = tuple(BlockGrant(slot, 0, np.arange(10, dtype=np.int32) + slot * 10) for slot in range(len(params)))
    plans = [plan(0, [(slot, 0, length) for slot, length in enumerate(lengths)], admissions=admissions, grants=grants)]
    for step in range(decodes):
        live = range(min(step, len(params) - 1), len(params))
        backs = (Revocation(step - 1, 1),) if 0 < step < len(params) else ()
        plans.append(plan(step + 1, [(slot, lengths[slot] + step, 1) for slot in live], revocations=backs))
    return plans


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.2, "seed": 7, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}},
    {"temperature": 0.9, "seed": 8, "min_p": 0.05, "top_k": 20},
]


BANNED = tuple((token, token * step % 157) for token in range(160) for step in range(1, 40))


def test_steps_match_the_pack_of_the_core(folder: Path) -> None:
    processor = Processor()
    outputs = []
    for ops in (TorchOps(), make_ops(processor)):
        runner = Runner(ops, load(folder, ops), LIMITS, TorchPostprocess)
        outputs.append([runner.execute(each) for each in conversation(MIXED)])
    for expected, found in zip(*outputs, strict=True):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        if expected.logprobs is not None:
            np.testing.assert_allclose(found.logprobs.top, expected.logprobs.top, atol=1e-4)
    assert processor.captured == 4
    assert processor.replays == 5


def test_packed_weights_are_replayed_like_others(folder: Path) -> None:
    """Experts and the output projection, too; the oracle multiplies by the dequantized weights."""
    processor = Processor()
    config, outputs = EngineConfig(model=str(folder), quantization="int8"), []
    for ops in (NumpyOps(), make_ops(processor)):
        model = OnProcessor(config).load_model(folder, ops, lambda done, total: None)
        assert {use.computed for use in model.weights} == {"int8", "float32"}
        runner = Runner(ops, model, LIMITS, NumpyPostprocess if isinstance(ops, NumpyOps) else TorchPostprocess)
        outputs.append([runner.execute(each).tokens for each in conversation(MIXED)])
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert processor.replays == 5


def test_step_uploads_once_and_waits_for_the_device_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = Processor()
    ops = make_ops(processor)
    runner = Runner(ops, load(folder, ops), LIMITS, TorchPostprocess)
    for each in conversation(MIXED):
        before = processor.waits, processor.uploads
        with nothing_waits(monkeypatch):
            runner.execute(each)
        assert processor.waits == before[0] + 1
        if not each.admissions:  # one that is penalized brings counts, too
            assert processor.uploads == before[1] + 1


def test_pipelined_steps_match_sequential_ones(folder: Path) -> None:
    """With the device of an engine, and with graphs, whose logits are valid until the next replay.

    The text of one request decides what it may sample: that is queued after the tokens of the step before arrived.
    """
    params = [*MIXED[:4], {"temperature": 0.9, "seed": 9, "bad_words_token_ids": BANNED}]
    processor = Processor()
    outputs = []
    for ops in (TorchOps(), make_ops(processor)):
        runner = Runner(ops, load(folder, ops), LIMITS, TorchPostprocess)
        device = make_device(runner, 2, "memory")
        assert isinstance(device, LaunchingDevice if ops.queues else ThreadDevice)
        first, *plans = conversation(params)
        device.submit(first)
        found = []
        for each in plans:
            assert not ops.queues or runner.must_wait(each) is None
            device.submit(each)
            found.append(device.collect(20.0).tokens)
        outputs.append([*found, device.collect(20.0).tokens])
        device.close()
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert processor.replays == 5


WAITS = (lambda one: one.item(), lambda one: one.tolist(), lambda one: one.cpu(), lambda one: one[one > 0], int, bool)


@pytest.mark.parametrize("wait", WAITS)
def test_synchronization_watch_detects_waits(wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="waits for the device"), nothing_waits(monkeypatch):
        wait(torch.ones(1))


def test_padding_is_computed_only_if_charged_to_the_budget(folder: Path) -> None:
    ops = make_ops()
    runner = Runner(ops, load(folder, ops), LIMITS, TorchPostprocess)
    given: list[tuple[int, int]] = []
    runner.watch_forward(lambda step: given.append((len(step.token_ids), len(step.logits_rows))))
    plans = conversation(MIXED)
    runner.execute(plans[0])
    before = runner.cache.export_blocks(np.arange(50, 60, dtype=np.int32))
    for each in plans[1:]:
        runner.execute(each)
    assert given[1:] == [(6, 5), (4, 4), (4, 3), (2, 2), (1, 1)]
    np.testing.assert_array_equal(runner.cache.export_blocks(np.arange(50, 60, dtype=np.int32)), before)


def test_smallest_budget_is_not_exceeded_by_padding(folder: Path) -> None:
    ops = make_ops()
    tight = Limits(
        max_num_seqs=6, max_num_batched_tokens=3, max_model_len=40, block_size=4, num_kv_blocks=60, vocab_size=160
    )
    runner = Runner(ops, load(folder, ops), tight, TorchPostprocess)
    admissions = tuple(admission(slot, 1, temperature=0.0) for slot in range(3))
    grants = tuple(BlockGrant(slot, 0, ids(slot)) for slot in range(3))
    rows = [(slot, 0, 1) for slot in range(3)]
    output = runner.execute(plan(0, rows, admissions=admissions, grants=grants))
    assert (output.tokens[:3] >= 0).all()
    with pytest.raises(BudgetExceeded):
        runner.execute(plan(1, [(0, 1, 1), (1, 1, 1), (2, 0, 2)], sampling=[True, True, False]))


def test_decode_with_a_one_token_prefill_chunk_is_replayed(folder: Path) -> None:
    processor = Processor()
    outputs = []
    for ops in (TorchOps(), make_ops(processor)):
        runner = Runner(ops, load(folder, ops), LIMITS, TorchPostprocess)
        admissions = (admission(0, 1, temperature=0.0), admission(1, 4, temperature=0.0))
        grants = (BlockGrant(0, 0, ids(8, 9)), BlockGrant(1, 0, ids(3, 4)))
        first = plan(0, [(0, 0, 1), (1, 0, 1)], sampling=[True, False], admissions=admissions, grants=grants)
        second = plan(1, [(0, 1, 1), (1, 1, 3)])
        outputs.append([runner.execute(each).tokens for each in (first, second)])
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert processor.replays == 1


def test_replay_reads_no_row_of_an_earlier_larger_batch(folder: Path) -> None:
    """Sample the last few rows of a large batch, then fewer of a small batch: stale indices are not used."""
    processor = Processor()
    outputs = []
    for ops in (TorchOps(), make_ops(processor)):
        runner = Runner(ops, load(folder, ops), LIMITS, TorchPostprocess)
        admissions = tuple(admission(slot, 4, temperature=0.0) for slot in range(6))
        grants = tuple(BlockGrant(slot, 0, ids(2 * slot, 2 * slot + 1)) for slot in range(6))
        large = plan(
            0,
            [(slot, 0, 1) for slot in range(6)],
            sampling=[False] * 6,
            admissions=admissions,
            grants=grants,
        )
        rest = plan(1, [(4, 1, 3), (5, 1, 3)])
        wanted = plan(
            2, [*((slot, 1, 1) for slot in range(4)), (4, 4, 1), (5, 4, 1)], sampling=[False] * 4 + [True] * 2
        )
        small = plan(3, [(5, 5, 1), (0, 2, 1)], sampling=[True, False])
        outputs.append([runner.execute(each).tokens for each in (large, rest, wanted, small)])
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert processor.replays == 3


def test_kv_cache_is_sized_from_free_memory(folder: Path) -> None:
    config = EngineConfig(model=str(folder), max_num_seqs=8, max_num_batched_tokens=64, gpu_memory_utilization=1.0)
    backend = OnProcessor(config)
    model = backend.load_model(folder, backend.make_ops(), lambda done, total: None)
    kept = calculated(config, model, backend.default_sizes)
    shape = model.kv_shape(config.block_tokens)
    bytes_per_block = shape.bytes_per_block(4)
    backend.processor.free = kept.total + 5 * bytes_per_block + 1
    limits = resolve_limits(
        config,
        model_max_len=model.max_positions,
        vocab_size=model.vocab_size,
        bytes_per_block=bytes_per_block,
        free_bytes=backend.free_memory(),
    )
    assert limits.num_kv_blocks == 5


def test_operations_on_logits_use_the_kernels() -> None:
    class Named(SamplingKernels):
        """Answers with the name of what was called."""

        def __getattribute__(self, name: str) -> Any:
            return (lambda *_: name) if name in called else super().__getattribute__(name)

    called = {"sample", "add_at", "penalize", "mask_logits", "logprobs", "ranks", "verify"}
    ops = make_ops()
    ops._kernels = replace(ops._kernels, sampling=Named())
    for name in called:
        arguments = [None] * (getattr(CudaOps, name).__code__.co_argcount - 1)
        assert getattr(ops, name)(*arguments) == name


def test_uploaded_arrays_may_be_changed_at_once() -> None:
    array = ids(1, 2)
    on_the_device = make_ops().from_host(array)
    array[:] = 9
    assert on_the_device.tolist() == [1, 2]


def test_dtype_without_kernels_is_rejected() -> None:
    from fd_core.errors import ConfigError

    from fd_gpu_cuda.backend import CudaBackend

    with pytest.raises(ConfigError, match="expected one of auto, float32, bfloat16, float16, got 'float8'"):
        CudaBackend(EngineConfig(model="x", dtype="float8")).make_ops()
