"""Paddle devices without float64 sums, long sorts and bfloat16 scatters: the pack needs none of them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from fd_core.backends.paddle import PaddleBackend
from fd_core.ops.contract import KVShape

if find_spec("paddle") is None:
    pytest.skip("Paddle is not installed; `nox -s paddle` tests its pack", allow_module_level=True)

from fd_core.ops.paddle.framework import paddle
from fd_core.ops.paddle.ops import PaddleKVCache, PaddleOps
from tests.backends.few_kernels import lacking


@pytest.fixture
def few_kernels(monkeypatch):
    for name, computed in [*lacking()]:
        monkeypatch.setattr(paddle._C_ops, name, computed)


REFUSED = {
    "cumsum of float64": lambda: paddle.cumsum(paddle.ones([2, 3], "float64"), axis=1),
    "sum of float64": lambda: paddle.ones([2, 3], "float64").sum(axis=1),
    "sum in float64": lambda: paddle.ones([2, 3]).sum(axis=1, dtype="float64"),
    "argsort of 16,384": lambda: paddle.argsort(paddle.ones([2, 16_384]), axis=1),
    "scatter of bfloat16": lambda: paddle.scatter_(
        paddle.ones([2, 2], "bfloat16"), paddle.zeros([1], "int32"), paddle.ones([1, 2], "bfloat16")
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_restricted_device_rejects_unsupported_kernels(few_kernels, name):
    with pytest.raises(RuntimeError, match="the device has no kernel"):
        REFUSED[name]()


def test_cpu_implementation_would_be_rejected(few_kernels):
    with pytest.raises(RuntimeError, match="argsort of 20000 entries"):
        PaddleOps().logprobs(paddle.ones([1, 20_000]), paddle.zeros([1], "int32"), 1)


def test_unmeasured_devices_use_short_sorts_only():
    assert PaddleBackend.longest_sort is not None
    assert PaddleBackend.longest_sort < 16_384


def test_bfloat16_keys_and_values_are_written_as_words(few_kernels):
    """Run on the CPU, which scatters bfloat16 as well but cannot multiply it."""
    shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=6, block_size=4)
    cache = PaddleKVCache(shape, 3, paddle.bfloat16, paddle.CPUPlace())
    bits = np.random.default_rng(0).integers(0, 2**16, (5, 6, 6)).astype(np.uint16)
    _, k, v = paddle.split(paddle.to_tensor(bits).view("bfloat16"), [2, 2, 2], axis=1)
    slots = np.array([11, 0, 4, 7, 2], np.int32)
    PaddleOps().write_kv(cache.layer(1), k, v, paddle.to_tensor(slots))
    held = cache.export_blocks(np.arange(3, dtype=np.int32))
    expected = np.zeros((12, 2, 2, 6), np.uint16)
    expected[slots] = np.stack([bits[:, 2:4], bits[:, 4:]], axis=1)
    np.testing.assert_array_equal(held[:, 1].swapaxes(1, 2).reshape(12, 2, 2, 6), expected)
    assert not held[:, 0].any()
    other = PaddleKVCache(shape, 3, paddle.bfloat16, paddle.CPUPlace())
    other.import_blocks(np.array([2, 0, 1], np.int32), held)
    np.testing.assert_array_equal(other.export_blocks(np.array([2, 0, 1], np.int32)), held)


def test_expert_routing_of_many_tokens_is_chunked(few_kernels):
    """More choices than the device can sort at once."""
    from fd_core.testing.models.layers import Geometry, LayerOn

    experts = LayerOn(PaddleOps(), Geometry(experts=5), [(1, 1)]).experts
    x = paddle.to_tensor(np.random.default_rng(1).standard_normal((9000, Geometry().hidden)).astype(np.float32))
    at_once = PaddleOps.moe
    found = PaddleOps(longest_sort=8192).moe(x, experts, "silu")
    halves = [at_once(PaddleOps(), part, experts, "silu") for part in (x[:4000], x[4000:8000], x[8000:])]
    np.testing.assert_allclose(found.numpy(), paddle.concat(halves).numpy(), rtol=1e-4, atol=1e-5)


CHOSEN = "(cases or operations or kv or fusions) and not test_step"


@pytest.mark.slow
def test_kit_needs_no_unsupported_xpu_kernel():
    if find_spec("fd_xpu") is None:
        pytest.skip("fd-xpu is not installed")
    words = ["-p", "tests.backends.few_kernels", "-p", "no:cacheprovider", "-k", CHOSEN]
    words += ["--fd-quick", "--fd-backend=xpu"]
    command = [sys.executable, "-m", "pytest", *words, "--pyargs", "fd_core.testing.suite"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 100
