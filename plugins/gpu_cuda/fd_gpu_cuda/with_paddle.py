"""The backend `gpu_cuda+paddle`: the core's Paddle pack on an NVIDIA GPU."""

from __future__ import annotations

from typing import ClassVar

from fd_core.backends.contract import Availability
from fd_core.backends.paddle import PaddleBackend

from fd_gpu_cuda.probe import device_problem

__all__ = ["CudaPaddleBackend"]


class CudaPaddleBackend(PaddleBackend):
    """Paddle on one CUDA device, kernel by kernel."""

    name: ClassVar[str] = "gpu_cuda+paddle"
    device: ClassVar[str] = "gpu"
    title: ClassVar[str] = "CUDA device"
    paddle_hint: ClassVar[str] = "install a paddlepaddle-gpu of version 3.3 or later for your CUDA"
    longest_sort: ClassVar[int | None] = None
    auto_rank: ClassVar[int] = 50

    @classmethod
    def probe(cls) -> Availability:
        """Available where Paddle sees a device; it is asked in a process of its own, and only if the driver has one."""
        _, problem = device_problem()
        return Availability(False, problem) if problem else super().probe()
