"""Paddle backends on a device: memory of steps, attention in parts, and faults reported at startup."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from fd_core.backends import paddle as backends
from fd_core.backends.paddle import PaddleBackend, PaddleDevices
from fd_core.config import EngineConfig, Limits
from fd_core.engine.computing import rehearsed
from fd_core.errors import PluginError
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.contract import StepInput
from fd_core.runner.runner import Runner
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.testing.models.layers import Geometry, LayerOn

if find_spec("paddle") is None:
    pytest.skip("Paddle is not installed; `nox -s paddle` tests its pack", allow_module_level=True)

from fd_core.ops.paddle import framework, ops
from fd_core.ops.paddle.framework import paddle
from fd_core.ops.paddle.ops import PaddleOps
from fd_core.runner.postprocess.paddle_matrix import PaddlePostprocess

REQUIRE_VIEWS = framework.require_views
ROWS = [(1, 37), (6, 20), (6, 41), (1, 9), (6, 6), (1, 64)]


class Chip(PaddleBackend):
    """A device that is the CPU under another name."""

    name: ClassVar[str] = "chip"
    device: ClassVar[str] = "chip"
    title: ClassVar[str] = "chip"
    paddle_hint: ClassVar[str] = "install chippaddle"

    def _dtype(self) -> str:
        return "float32"

    def device_ops(self, dtype: str, place: str) -> PaddleOps:
        return PaddleOps(dtype, "cpu")


@pytest.fixture
def chip(monkeypatch) -> Chip:
    monkeypatch.setattr(backends, "paddle_devices", lambda: PaddleDevices("3.4", ("chip:0",)))
    monkeypatch.setattr(framework, "require_views", lambda: None)
    return Chip(EngineConfig(model="m", num_threads=1))


class Memory:
    """The part of a device module of Paddle that measures, for an allocator that keeps what it took."""

    def __init__(self) -> None:
        self.used, self.cached, self.peak = 100, 30, 500

    def empty_cache(self) -> None:
        self.cached = 0

    def memory_reserved(self) -> int:
        return self.used + self.cached

    def reset_max_memory_reserved(self) -> None:
        self.peak = self.memory_reserved()

    def max_memory_reserved(self) -> int:
        return self.peak

    @contextmanager
    def steps(self) -> Iterator[None]:
        self.used, self.peak = self.used + 50, 350  # 50 remain in use
        yield
        self.used, self.cached = self.used - 20, 200


def test_steps_are_rehearsed_and_their_memory_is_reserved(chip, monkeypatch):
    memory = Memory()
    monkeypatch.setattr(paddle.device, "get_device_module", lambda device: memory)
    monkeypatch.setattr(
        paddle.device, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000 + memory.used)
    )
    assert (chip.free_memory(), chip.reserved_memory) == (970, 0)
    chip.rehearse(memory.steps())
    assert chip.reserved_memory == 350 - 130
    assert chip.free_memory() == 1000 - 220
    assert chip.describe() == "chip, Paddle eager, 0 MiB measured for steps"


def test_step_that_does_not_fit_raises_memory_error(chip, monkeypatch):
    monkeypatch.setattr(paddle.device, "get_device_module", lambda device: Memory())

    @contextmanager
    def steps() -> Iterator[None]:
        paddle.zeros([1 << 45])
        yield

    with pytest.raises(MemoryError):
        chip.rehearse(steps())


def test_failing_memory_query_is_named_before_weights_are_loaded(chip, monkeypatch):
    def fail(device: str) -> Any:
        raise ValueError(f"The current string {device}\nis not expected")

    monkeypatch.setattr(paddle.device, "get_device_properties", fail)
    with pytest.raises(PluginError, match="the chip backend cannot use the chip: The current string chip is not expe"):
        chip.make_ops()


def test_device_whose_views_are_copies_is_named(chip, monkeypatch):
    monkeypatch.setattr(framework, "require_views", REQUIRE_VIEWS)
    monkeypatch.setattr(paddle.Tensor, "view", lambda tensor, dtype: paddle.zeros(tensor.shape, dtype))
    with pytest.raises(PluginError, match=r"cannot use the chip: a view .* does not share its memory: wrote 1"):
        chip.make_ops()


def test_device_without_views_is_named(chip, monkeypatch):
    def refuse(tensor: Any, dtype: str) -> Any:
        raise RuntimeError("kernel view_dtype is not registered")

    monkeypatch.setattr(framework, "require_views", REQUIRE_VIEWS)
    monkeypatch.setattr(paddle.Tensor, "view", refuse)
    with pytest.raises(PluginError, match="which FLAGS_use_stride_kernel=1 enables, fails: kernel view_dtype is not"):
        chip.make_ops()


def test_views_are_enabled_where_the_environment_disables_them():
    code = """if True:
        import logging
        from fd_core.backends.paddle import CpuPaddleBackend
        from fd_core.config import EngineConfig
        from fd_core.ops.contract import KVShape
        logging.basicConfig(format="%(message)s")
        ops = CpuPaddleBackend(EngineConfig(model="m", num_threads=1)).make_ops()
        cache = ops.allocate_kv(KVShape(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2), 2)
        print(cache.layer(0).key_words.shape)"""
    environment = {**os.environ, "FLAGS_use_stride_kernel": "0", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "[4, 4]" in ended.stdout, ended.stderr
    assert "FLAGS_use_stride_kernel=0 is ignored: KV is written through views" in ended.stderr


@pytest.mark.parametrize("geometry", [Geometry(), Geometry(window=11, softcap=4.0), Geometry(host_copy=True)], ids=str)
def test_attention_in_parts_equals_attention_at_once(geometry, monkeypatch):
    whole = LayerOn(PaddleOps(), geometry, ROWS).run(PaddleOps)
    scores: list[int] = []
    softmax = ops.functional.softmax
    monkeypatch.setattr(ops.functional, "softmax", lambda x, axis: scores.append(x.size) or softmax(x, axis=axis))
    monkeypatch.setattr(ops, "_MOST_SCORES", 3 * 64 * geometry.heads)
    monkeypatch.setattr(ops, "_MOST_KEYS", 64 * geometry.kv_heads * geometry.d)
    parts = LayerOn(PaddleOps(), geometry, ROWS).run(PaddleOps)
    for one, other in zip(parts, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert max(scores) <= 3 * 64 * geometry.heads
    assert len(scores) > len({count for count, _ in ROWS})


@pytest.mark.parametrize(("host_copy", "copies"), [(False, 3), (True, 0)])
def test_attention_plan_of_a_step_from_the_host_copies_nothing_back(host_copy, copies, monkeypatch):
    layer = LayerOn(PaddleOps(), Geometry(host_copy=host_copy), ROWS)
    q = layer.ops.from_host(np.ones((layer.tokens, layer.g.heads, layer.g.d), np.float32))
    copied: list[Any] = []
    numpy = paddle.Tensor.numpy
    monkeypatch.setattr(paddle.Tensor, "numpy", lambda tensor: copied.append(tensor) or numpy(tensor))
    layer.ops.paged_attention(q, layer.kv, layer.heads, layer.step)
    assert len(copied) == copies


def test_rehearsal_runs_on_the_pack(tmp_path):
    pack = PaddleOps()
    with open_checkpoint(write_checkpoint("llama", tmp_path)) as checkpoint:
        model = load_model(checkpoint, pack, 100)
    limits = Limits(
        max_num_seqs=5,
        max_num_batched_tokens=40,
        max_model_len=100,
        block_size=4,
        num_kv_blocks=1000,
        vocab_size=model.vocab_size,
        max_drafts=3,
    )
    steps: list[StepInput] = []

    def make(limits: Limits) -> Runner:
        runner = Runner(pack, model, limits, PaddlePostprocess)
        runner.watch_forward(steps.append)
        return runner

    with rehearsed(make, limits):
        pass
    assert [len(step.token_ids) for step in steps] == [40, 5, 5 * 4]  # the first step needs states, not logits
