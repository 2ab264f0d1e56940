"""Pytest plugin that replaces the CUDA device with the CPU, for the conformance kit.

`pytest -p kit_on_processor --pyargs fd_core.testing.suite --fd-backend=gpu_cuda`, with this folder and the one
above first on the path.
"""

from __future__ import annotations

from fd_core.backends.contract import Availability, Backend
from processor import OnProcessor

from fd_gpu_cuda.backend import CudaBackend


def probe() -> Availability:
    return Availability(True, "emulated on the CPU by a test", emulated=True)


CudaBackend.probe = staticmethod(probe)  # type: ignore[assignment, method-assign]  # for the whole process
CudaBackend.rank_environments = Backend.rank_environments  # type: ignore[method-assign]  # ranks may be threads
CudaBackend.make_ops = OnProcessor.make_ops  # type: ignore[method-assign]
