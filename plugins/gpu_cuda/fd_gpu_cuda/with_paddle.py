"""The backend `gpu_cuda+paddle`: the core's Paddle pack on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fd_core.backends import paddle
from fd_core.backends.contract import Availability
from fd_core.backends.paddle import PaddleBackend
from fd_core.backends.places import EnginePlace

from fd_gpu_cuda.probe import cuda_places, device_problem


class CudaPaddleBackend(PaddleBackend):
    """Paddle on one CUDA device, kernel by kernel."""

    name: ClassVar[str] = "gpu_cuda+paddle"
    device: ClassVar[str] = "gpu"
    title: ClassVar[str] = "CUDA device"
    paddle_hint: ClassVar[str] = (
        "pip install 'fd-core[paddle-gpu]' with the index of Paddle's own builds for your CUDA, "
        "which www.paddlepaddle.org.cn/en/install/quick names"
    )
    longest_sort: ClassVar[int | None] = None
    auto_rank: ClassVar[int] = 50

    @classmethod
    def probe(cls) -> Availability:
        """Available where a current Paddle for CUDA sees a device; it is asked only if the driver has one."""
        _, problem = device_problem()
        if problem:
            return Availability(False, problem)
        if paddle.paddle_installed():
            found = paddle.paddle_devices()
            if _is_old(found.version):
                return Availability(False, f"Paddle {found.version} is too old; {cls.paddle_hint}")
            if not found.built_for_cuda:
                return Availability(False, f"Paddle {found.version} is built for processors only; {cls.paddle_hint}")
        return super().probe()

    @classmethod
    def places(cls, count: int, ranks: int = 1) -> Sequence[EnginePlace]:
        """Give each engine a device for each rank."""
        return cuda_places(count, ranks)


def _is_old(version: str) -> bool:
    """Whether a release is older than 3.3; builds from source call themselves 0.0.0."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return (0, 0) < numbers < (3, 3)
