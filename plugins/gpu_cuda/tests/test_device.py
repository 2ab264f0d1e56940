"""Calls of `Cuda` to torch and Triton, which are replaced by fakes; the rest needs a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fd_core.ops.parallel import RankExchangeError  # noqa: E402 - only where torch is installed

from fd_gpu_cuda.device import Cuda, sum_in_float32  # noqa: E402


@pytest.fixture
def cuda() -> Cuda:
    """Device that is never initialised."""
    made = object.__new__(Cuda)
    made.device = torch.device("cuda", 0)
    made._pool, made._captures = object(), SimpleNamespace(wait_stream=lambda other: None)
    return made


def test_error_in_a_capture_is_raised_even_if_ending_it_fails(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        ended = 0

        def capture_begin(self, **_: Any) -> None:
            pass

        def capture_end(self) -> None:
            Graph.ended += 1
            raise RuntimeError("the capture was invalidated")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    calls = iter([None, torch.OutOfMemoryError("CUDA out of memory")])

    def compute() -> None:
        if error := next(calls):
            raise error

    with pytest.raises(torch.OutOfMemoryError):
        cuda.capture(compute)
    assert Graph.ended == 1


def test_shared_memory_of_a_block_is_read_from_triton(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 does not; this is the number that Triton itself compares a kernel's wish with."""
    runtime = pytest.importorskip("triton.runtime")
    utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": 232448 + index})
    monkeypatch.setattr(runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    assert cuda.shared_memory_per_block == 232448


@pytest.mark.parametrize("name", ["abort", "_abort"])
def test_collectives_are_aborted_under_the_name_of_each_release_of_torch(cuda: Cuda, name: str) -> None:
    aborted = []

    class Apart:
        def wait_until(self, ready: Any) -> None:
            raise RankExchangeError("rank 1 does not answer")

    cuda.ranks = Apart()  # type: ignore[assignment]  # the only attribute of the group in use
    cuda._connection = SimpleNamespace(**{name: lambda: aborted.append(name)})
    with pytest.raises(RankExchangeError):
        cuda.wait_for(SimpleNamespace(query=lambda: False))
    assert aborted == [name]


def test_products_accumulate_in_float32_despite_earlier_settings() -> None:
    matmul, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    switches = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    try:
        torch.set_float32_matmul_precision("high")
        for name in switches:
            setattr(matmul, name, True)
        sum_in_float32()
        assert torch.get_float32_matmul_precision() == "highest"
        assert not matmul.allow_tf32
        assert not any(getattr(matmul, name) for name in switches)
    finally:
        torch.set_float32_matmul_precision(before)
        for name in switches:
            setattr(matmul, name, True)  # as torch sets them
