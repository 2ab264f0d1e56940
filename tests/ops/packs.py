"""Packs under test; their input arrays are those of the kit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import pytest

from fd_core.ops.contract import Ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.torch.ops import TorchOps
from fd_core.testing.models.arrays import on_device, raw, sample_input, step_input

__all__ = ["FORMS", "INSTALLED", "PACKS", "on_device", "raw", "require_format", "sample_input", "step_input"]


def _paddle() -> Ops:
    if find_spec("paddle") is None:
        pytest.skip("Paddle is not installed; `nox -s paddle` tests its pack")
    from fd_core.ops.paddle.ops import PaddleOps

    return PaddleOps()


def _onnx() -> Ops:
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        pytest.skip("ONNX Runtime is not installed; `nox -s onnx` tests its pack")
    from fd_core.ops.onnx_graph.pack import OnnxOps

    return OnnxOps()


PACKS: dict[str, Callable[[], Ops]] = {"numpy": NumpyOps, "torch": TorchOps, "paddle": _paddle, "onnx": _onnx}
"""Packs in float32. Creating one skips the test if its framework is not installed."""
FORMS: dict[str, Callable[[], Ops]] = {
    **PACKS,
    "bf16": partial(TorchOps, "bfloat16"),
    "f16": partial(TorchOps, "float16"),
}
_NEEDS = {"numpy": "numpy", "torch": "torch", "paddle": "paddle", "onnx": "onnxruntime"}
INSTALLED = tuple(name for name in PACKS if find_spec(_NEEDS[name]) is not None)


def require_format(ops: Ops, kind: str) -> None:
    """Skip the running test if a pack dequantizes weights of a format."""
    if kind not in ops.weight_formats:
        computed = ", ".join(sorted(ops.weight_formats)) or "no packed weights"
        pytest.skip(f"not tested: its pack supports {computed} and dequantizes others")
