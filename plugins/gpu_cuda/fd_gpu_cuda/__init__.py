"""Backends and a postprocessor for NVIDIA GPUs; importing this imports no framework."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1

__version__ = "0.2.0"


@hookimpl
def fd_register_backends() -> list[Entry]:
    """Offer one backend for each framework."""
    return [
        Entry("gpu_cuda", "fd_gpu_cuda.backend:CudaBackend", "NVIDIA GPUs with PyTorch, Triton and CUDA graphs"),
        Entry("gpu_cuda+paddle", "fd_gpu_cuda.backend:CudaPaddleBackend", "NVIDIA GPUs with PaddlePaddle"),
        Entry("gpu_cuda+onnx", "fd_gpu_cuda.backend:CudaOnnxBackend", "NVIDIA GPUs with ONNX Runtime"),
    ]


@hookimpl
def fd_register_postprocessors() -> list[Entry]:
    """Offer the postprocessor of the backend of the same name, for which it is the default."""
    return [Entry("gpu_cuda", "fd_gpu_cuda.backend:CudaPostprocess", "the token matrix in one launch")]
