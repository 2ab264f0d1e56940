"""Ranks of one model with a device each, on the CPU, with gloo instead of NCCL: never run on two GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from extent import AT_LENGTH
from fd_core.config import EngineConfig
from fd_core.errors import ConfigError
from fd_core.ops.parallel import Parallel, RankExchangeError, RankGroup
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess
from fd_core.runner.runner import Runner
from fd_core.testing.kit.ranks import expert_parallel, gloo_ranks, on_ranks, shared_memory_ranks
from fd_core.testing.models.checkpoints import write_checkpoint
from processor import OnProcessor, Processor, make_ops
from test_steps import CASES, LIMITS, MIXED, conversation

from fd_gpu_cuda import backend
from fd_gpu_cuda.backend import NCCL_BYTES, CudaBackend


def steps(folder: Path, group: RankGroup | None, quantization: str = "auto") -> tuple[list[Any], Processor]:
    """Run a conversation on one rank, and return the tokens of its steps."""
    processor = Processor()
    ops = make_ops(processor)
    if group is not None:
        ops.join(group)
    config = EngineConfig(model=str(folder), quantization=quantization)
    model = OnProcessor(config).load_model(folder, ops, lambda done, total: None)
    runner = Runner(ops, model, LIMITS, TorchPostprocess)
    return [runner.execute(each).tokens for each in conversation(MIXED)], processor


@pytest.mark.parametrize(
    ("case", "quantization"),
    [
        # The sample takes the weights in turn.
        pytest.param(case, quantization, marks=() if place == number % 2 else AT_LENGTH)
        for number, case in enumerate(CASES)
        for place, quantization in enumerate(("auto", "int8"))
    ],
)
def test_two_ranks_match_one_and_replay_their_decodes(case: str, quantization: str, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path)
    alone, _ = steps(tmp_path, None, quantization)
    for make in (shared_memory_ranks, gloo_ranks):
        for tokens, processor in on_ranks(2, lambda group: steps(tmp_path, group, quantization), make=make):
            np.testing.assert_array_equal(tokens, alone)
            assert processor.replays == 5


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_two_ranks_that_divide_experts_match_one(quantization: str, tmp_path: Path) -> None:
    write_checkpoint("qwen3-moe", tmp_path)
    alone, _ = steps(tmp_path, None, quantization)
    make = expert_parallel(shared_memory_ranks)
    for tokens, _ in on_ranks(2, lambda group: steps(tmp_path, group, quantization), make=make):
        np.testing.assert_array_equal(tokens, alone)


def test_ranks_hold_shares_of_the_kv_heads(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, num_attention_heads=9, num_key_value_heads=3, head_dim=8)

    def work(group: RankGroup) -> tuple[int, int]:
        ops = make_ops()
        ops.join(group)
        model = OnProcessor(EngineConfig(model=str(tmp_path))).load_model(tmp_path, ops, lambda done, total: None)
        shape = model.kv_shape(4)
        return shape.first_kv_head, shape.num_kv_heads

    assert on_ranks(2, work) == [(0, 2), (2, 1)]


def test_timeout_on_a_rank_names_it() -> None:
    class Stuck(Processor):
        def wait(self) -> None:
            assert self.ranks is not None
            self.ranks.wait_until(lambda: False)

    def work(group: RankGroup) -> None:
        ops = make_ops(Stuck())
        ops.join(group)
        x = ops.all_reduce(ops.from_host(np.ones((1, 4), np.float32)))
        if group.parallel.rank == 0:
            with pytest.raises(RankExchangeError, match="rank 1 did not respond"):
                ops.to_host(x)

    on_ranks(2, work, 0.4)


def test_each_rank_sees_one_device_and_too_few_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "device_problem", lambda: (2, ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert CudaBackend.rank_environments(2) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    with pytest.raises(ConfigError, match="3 ranks need one device each, found 2") as caught:
        CudaBackend.rank_environments(3)
    assert caught.value.field == "--tensor-parallel-size"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(ConfigError, match="found 1"):
        CudaBackend.rank_environments(2)


def test_memory_is_reserved_for_collectives(tmp_path: Path) -> None:
    free = []
    for size in (1, 2):
        backend = OnProcessor(EngineConfig(model=str(tmp_path), tensor_parallel_size=size))
        backend.make_ops()
        free.append(backend.free_memory())
    assert free[0] - free[1] == NCCL_BYTES


def test_single_device_pack_has_no_ranks() -> None:
    ops = make_ops()
    assert ops.parallel == Parallel()
    x = ops.from_host(np.ones((1, 4), np.float32))
    assert ops.all_reduce(x) is x and ops.all_gather(x) is x
