"""Backends and a postprocessor for NVIDIA GPUs; importing this imports no framework."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1

__version__ = "0.2.0"


@hookimpl
def fd_register_backends() -> list[Entry]:
    """Register one backend per framework."""
    return [
        Entry("gpu_cuda", "fd_gpu_cuda.backend:CudaBackend", "NVIDIA GPUs with PyTorch, Triton and CUDA graphs"),
        Entry("gpu_cuda+paddle", "fd_gpu_cuda.backend:CudaPaddleBackend", "NVIDIA GPUs with PaddlePaddle"),
        Entry("gpu_cuda+onnx", "fd_gpu_cuda.backend:CudaOnnxBackend", "NVIDIA GPUs with ONNX Runtime"),
    ]


@hookimpl
def fd_register_postprocessors() -> list[Entry]:
    """Register the default postprocessor of the backend of the same name."""
    return [Entry("gpu_cuda", "fd_gpu_cuda.backend:CudaPostprocess", "the token matrix in one launch")]
