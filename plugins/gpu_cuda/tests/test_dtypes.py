"""The dtype depends on the device's multiplication units; before Ampere whole steps run in float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from extent import AT_LENGTH  # noqa: E402
from fd_core.config import EngineConfig  # noqa: E402 - only where torch and Triton are installed
from fd_core.ops.torch.ops import TorchOps  # noqa: E402
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess  # noqa: E402
from fd_core.runner.runner import Runner  # noqa: E402
from fd_core.testing.models.checkpoints import write_checkpoint  # noqa: E402
from processor import Processor  # noqa: E402
from test_steps import LIMITS, conversation  # noqa: E402

from fd_gpu_cuda import device  # noqa: E402
from fd_gpu_cuda.backend import CudaBackend  # noqa: E402
from fd_gpu_cuda.kernel_table import Kernels  # noqa: E402


class T4(Processor):
    """The CPU with the properties of a device of compute capability 7.5."""

    name = "processor that calls itself T4"  # type: ignore[assignment]  # a property of `Cuda`
    has_bfloat16 = False  # type: ignore[assignment]  # as above
    has_float16 = True  # type: ignore[assignment]  # as above
    multiplies_fp8 = False  # type: ignore[assignment]  # as above
    multiprocessors = 40  # type: ignore[assignment]  # as above
    shared_memory_per_block = 64 * 1024  # type: ignore[assignment]  # as above


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((9, 0), "bfloat16", "has bfloat16"),
        ((8, 0), "bfloat16", "has bfloat16"),
        ((7, 5), "float16", "but no bfloat16"),
        ((5, 3), "float16", "but no bfloat16"),
        ((5, 2), "float32", "neither"),
    ],
)
def test_auto_dtype_depends_on_the_device(
    capability: tuple[int, int], dtype: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    asked = device.Cuda.__new__(device.Cuda)  # without initialising CUDA
    asked.device = torch.device("cuda", 0)
    backend = CudaBackend(EngineConfig(model="x"))
    assert backend._fastest_dtype(asked) == dtype
    assert reason in backend.dtype_reason


@pytest.mark.parametrize("case", ["llama", pytest.param("gemma3", marks=AT_LENGTH)])
def test_steps_run_in_float16_on_devices_without_bfloat16(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter computes them; log-probabilities are compared, which rounding hardly affects."""
    monkeypatch.setattr(device, "Cuda", T4)
    monkeypatch.setattr(Kernels, "capturable", False)  # nothing records what the interpreter computes
    write_checkpoint(case, tmp_path)
    backend = CudaBackend(EngineConfig(model=str(tmp_path)))
    found: list[list[Any]] = []
    for ops in (TorchOps("float32"), backend.make_ops()):
        runner = Runner(ops, backend.load_model(tmp_path, ops, lambda done, total: None), LIMITS, TorchPostprocess)
        params = [{"temperature": 0.0, "logprobs": 1}, {"temperature": 0.0, "logprobs": 1}]
        found.append([runner.execute(each) for each in conversation(params, decodes=1)])
        exported = runner.cache.export_blocks(np.zeros(1, np.int32))
    assert ops.dtype == "float16"
    assert exported.dtype == np.float16
    for expected, output in zip(*found, strict=True):
        np.testing.assert_array_equal(output.tokens, expected.tokens)
        assert np.abs(np.asarray(output.logprobs.chosen) - np.asarray(expected.logprobs.chosen)).max() < 0.1


def test_float32_is_used_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "Cuda", T4)
    assert CudaBackend(EngineConfig(model="x", dtype="float32")).make_ops().dtype == "float32"
