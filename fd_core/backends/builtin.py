"""The backends that come with the core, offered through the same hook as a vendor's."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_backends() -> list[Entry]:
    """Offer the processor with each framework, `reference` and `null`."""
    return [
        Entry("cpu", "fd_core.backends.cpu:CpuBackend", "PyTorch on the processor, with compiled kernels if it can"),
        Entry("cpu+paddle", "fd_core.backends.paddle:CpuPaddleBackend", "Paddle on the processor, float32"),
        Entry("cpu+onnx", "fd_core.backends.onnx:OnnxBackend", "ONNX Runtime on the processor, float32"),
        Entry("reference", "fd_core.backends.cpu:ReferenceBackend", "numpy in float32: the oracle, slow"),
        Entry("null", "fd_core.backends.null:NullBackend", "scripted tokens without a model, for tests"),
    ]
