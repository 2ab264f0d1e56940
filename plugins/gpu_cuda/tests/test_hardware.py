"""Tests that need a GPU. Not part of the default run: `pytest -m hardware`."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fd_core.config import EngineConfig  # noqa: E402 - only where torch is installed
from fd_core.engine.building.builder import load_engine  # noqa: E402
from fd_core.ops.numpy.ops import NumpyOps  # noqa: E402
from fd_core.ops.torch.ops import TorchOps  # noqa: E402
from fd_core.ops.weights import WEIGHT_FORMATS  # noqa: E402
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess  # noqa: E402
from fd_core.runner.runner import Runner  # noqa: E402
from fd_core.testing.models.arrays import activations, on_device, packed_weight, sample_input  # noqa: E402
from fd_core.testing.models.checkpoints import write_checkpoint  # noqa: E402
from fd_core.testing.models.texts import greedy, run  # noqa: E402
from test_steps import CASES, LIMITS, MIXED, conversation  # noqa: E402

from fd_gpu_cuda.backend import CudaBackend, CudaPostprocess  # noqa: E402

pytestmark = pytest.mark.hardware


def runner_on(backend: CudaBackend, folder: Path, ops: Any = None) -> Runner:
    pack, postprocess = (backend.make_ops(), CudaPostprocess) if ops is None else (ops, TorchPostprocess)
    return Runner(pack, backend.load_model(folder, pack, lambda done, total: None), LIMITS, postprocess)


@pytest.mark.parametrize("case", CASES)
def test_steps_on_the_device_match_the_processor(case: str, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path)
    backend = CudaBackend(EngineConfig(model=str(tmp_path), dtype="float32"))
    outputs: list[list[Any]] = []
    for ops in (TorchOps(), backend.make_ops()):
        runner = Runner(ops, backend.load_model(tmp_path, ops, lambda done, total: None), LIMITS, TorchPostprocess)
        outputs.append([runner.execute(each).tokens for each in conversation(MIXED)])
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert backend.free_memory() > 0


@pytest.mark.parametrize("kind", sorted(WEIGHT_FORMATS))
def test_packed_weights_on_the_device_are_near_their_values(kind: str) -> None:
    """Few rows and many, compared with each other: 8-bit products round their inputs."""
    ops = CudaBackend(EngineConfig(model="x", dtype="bfloat16")).make_ops()
    weight = packed_weight(kind, 1500, 4096)
    prepared, x = ops.prepare_linear([weight]), np.random.default_rng(1).standard_normal((300, 4096), "f4")
    expected = x @ weight.to_float32().T
    for rows in (1, 16, 300):
        found = ops.to_host(ops.linear(activations(ops, x[:rows]), prepared))
        assert np.sqrt(np.square(found - expected[:rows]).mean()) < 0.04 * expected.std()


@pytest.mark.parametrize("kind", sorted(WEIGHT_FORMATS))
def test_packed_product_of_a_row_has_the_same_bits_in_any_batch(kind: str) -> None:
    """Launch after launch: programs that share a row meet in memory, and the last one adds up."""
    ops = CudaBackend(EngineConfig(model="x", dtype="bfloat16")).make_ops()
    prepared = ops.prepare_linear([packed_weight(kind, 1500, 4096)])
    x = activations(ops, np.random.default_rng(1).standard_normal((300, 4096), "f4"))
    alone = ops.to_host(ops.linear(x[:1], prepared))
    for rows in (*[1] * 50, 16, 40, 300):
        np.testing.assert_array_equal(ops.to_host(ops.linear(x[:rows], prepared))[:1], alone, err_msg=f"{rows} rows")


def test_filtered_tokens_are_the_oracles_launch_after_launch() -> None:
    """A barrier that is missing between the threads of a program shows as another token, or as a hang, now and then."""
    ops = CudaBackend(EngineConfig(model="x", dtype="float32")).make_ops()
    logits = 3 * np.random.default_rng(3).standard_normal((64, 5003), "f4")
    given = sample_input(64, temperature=0.9, top_k=50, top_p=0.8)
    expected, _ = NumpyOps().sample(logits, given)
    there, rows = ops.from_host(logits), on_device(ops, given)
    for _ in range(50):
        np.testing.assert_array_equal(ops.to_host(ops.sample(there, rows)[0]), expected)


def test_only_the_fetch_synchronises(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    backend = CudaBackend(EngineConfig(model=str(tmp_path)))
    ops = backend.make_ops()
    runner = Runner(ops, backend.load_model(tmp_path, ops, lambda done, total: None), LIMITS, TorchPostprocess)
    plans = conversation(MIXED)
    for each in plans[:3]:
        runner.execute(each)
    torch.cuda.set_sync_debug_mode("error")  # does not count the stream's own synchronize, which the fetch calls
    try:
        for each in plans[3:]:
            runner.execute(each)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_concurrent_copies_do_not_change_results(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    backend = CudaBackend(EngineConfig(model=str(tmp_path)))
    ops = backend.make_ops()
    runner = Runner(ops, backend.load_model(tmp_path, ops, lambda done, total: None), LIMITS, TorchPostprocess)
    spare = np.arange(50, 60, dtype=np.int32)
    before = runner.cache.export_blocks(spare)
    stop = threading.Event()

    def copy() -> None:
        while not stop.is_set():
            runner.cache.import_blocks(spare, runner.cache.export_blocks(spare))

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        for each in conversation(MIXED):
            runner.execute(each)
    finally:
        stop.set()
        thread.join()
    np.testing.assert_array_equal(runner.cache.export_blocks(spare), before)


def test_long_copies_arrive_bit_for_bit_by_lanes_that_take_turns(tmp_path: Path) -> None:
    """More pieces than lanes, of random bits; no other block is touched."""
    write_checkpoint("llama", tmp_path)
    runner = runner_on(CudaBackend(EngineConfig(model=str(tmp_path))), tmp_path)
    runner.cache._copies._capacity = 3
    every = np.arange(60, dtype=np.int32)
    data = runner.cache.export_blocks(every)
    bits = np.random.default_rng(0).integers(0, 256, data.nbytes, np.uint8).view(data.dtype).reshape(data.shape)
    runner.cache.import_blocks(every, bits)
    order = np.random.default_rng(1).permutation(every)
    assert runner.cache.export_blocks(order).tobytes() == bits[order].tobytes()
    runner.cache.import_blocks(order[:17], bits[order[17:34]])
    assert runner.cache.export_blocks(order[:17]).tobytes() == bits[order[17:34]].tobytes()
    assert runner.cache.export_blocks(order[17:]).tobytes() == bits[order[17:]].tobytes()


@pytest.mark.parametrize(("dtype", "margin"), [("float32", 1e-3), ("float16", 0.1), ("bfloat16", 0.5)])
@pytest.mark.parametrize("case", CASES)
def test_every_dtype_is_near_the_processor_in_float32(case: str, dtype: str, margin: float, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path)
    backend = CudaBackend(EngineConfig(model=str(tmp_path), dtype=dtype))
    params = [{"temperature": 0.0, "logprobs": 1} for _ in range(4)]
    first = conversation(params)[0]
    scores = []
    for runner in (runner_on(backend, tmp_path, TorchOps()), runner_on(backend, tmp_path)):
        found = runner.execute(first).logprobs
        assert found is not None
        scores.append(found.chosen)
    np.testing.assert_allclose(scores[1], scores[0], atol=margin)


@pytest.mark.parametrize("case", CASES)
def test_pipelined_steps_match_single_steps(case: str, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path)
    backend = CudaBackend(EngineConfig(model=str(tmp_path), dtype="float32"))
    plans = conversation(MIXED, decodes=12)
    alone = runner_on(backend, tmp_path)
    expected = [alone.execute(each).tokens for each in plans]
    runner, flying, found = runner_on(backend, tmp_path), deque[Any](), []
    for each in plans:
        while flying and (len(flying) > 1 or runner.must_wait(each)):
            found.append(runner.finish(flying.popleft()).tokens)
        flying.append(runner.launch(each))
    found += [runner.finish(each).tokens for each in flying]
    np.testing.assert_array_equal(found, expected)


def test_replayed_decodes_allocate_nothing(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    runner = runner_on(CudaBackend(EngineConfig(model=str(tmp_path))), tmp_path)
    plans = conversation([{"temperature": 0.0} for _ in range(4)], decodes=20)
    held = []
    for each in plans:
        runner.execute(each)
        held.append(torch.cuda.memory_allocated())
    assert len(set(held[10:])) == 1, "device memory grows from step to step"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_on_two_devices_match_one(case: str, tmp_path: Path) -> None:
    """NCCL inside captured graphs; ranks that differ in one bit would end the engine by their digests."""
    write_checkpoint(case, tmp_path)
    settings: dict[str, Any] = {"model": str(tmp_path), "backend": "gpu_cuda", "dtype": "float32", "max_model_len": 64}
    specs = [greedy(f"r{index}", range(3 + index, 13 + 2 * index), 24) for index in range(6)]
    texts = []
    for size in (1, 2):
        config = EngineConfig(**settings, tensor_parallel_size=size, num_kv_blocks=64, max_num_seqs=4, block_size=16)
        engine = load_engine(config, tmp_path, progress=lambda *_: None)
        try:
            texts.append(run(engine, specs).tokens)
        finally:
            engine.close()
    assert texts[0] == texts[1]
