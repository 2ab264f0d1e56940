"""The packs under test; the arrays to feed them are the kit's."""

from __future__ import annotations

from fd_core.ops.numpy_ops import NumpyOps
from fd_core.ops.torch_ops import TorchOps
from fd_core.testing.arrays import on_device, raw, sample_input, step_input

__all__ = ["PACKS", "on_device", "raw", "sample_input", "step_input"]

PACKS = {"numpy": NumpyOps, "torch": TorchOps}
