"""Built-in backends, registered through the same hook as those of vendors."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_backends() -> list[Entry]:
    """Register the CPU backend of each framework, `reference` and `null`."""
    return [
        Entry("cpu", "fd_core.backends.cpu:CpuBackend", "PyTorch on the CPU, native kernels with a compiler"),
        Entry("cpu+paddle", "fd_core.backends.paddle:CpuPaddleBackend", "Paddle on the CPU, float32"),
        Entry("cpu+onnx", "fd_core.backends.onnx:OnnxBackend", "ONNX Runtime on the CPU, float32"),
        Entry("reference", "fd_core.backends.cpu:ReferenceBackend", "numpy in float32: slow reference implementation"),
        Entry("null", "fd_core.backends.null:NullBackend", "scripted tokens without a model, for tests"),
    ]
