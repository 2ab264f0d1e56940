"""A pytest plugin that runs every kernel in Triton's interpreter, on the processor, for the conformance kit.

`pytest -p kit_in_interpreter --pyargs fd_core.testing.suite --fd-backend=gpu_cuda -k 'attention or layer'`,
with this folder and the one above first on the path. float32; no kernel gives way to a composition, so what is wrong
with one fails.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when kernels are defined

from collections.abc import Callable

import interpreting
import kit_on_processor  # noqa: F401 - replaces the device with the CPU
from processor import Processor

from fd_gpu_cuda.backend import CudaBackend
from fd_gpu_cuda.device import Replay
from fd_gpu_cuda.ops import CudaOps
from fd_gpu_cuda.providers import Providers, operations_on


class Interpreted(Processor):
    """A small device: work is divided among programs, but not among more than are interpreted in reasonable time."""

    name = "Triton's interpreter"  # type: ignore[assignment]  # a property of `Cuda`
    multiprocessors = 8  # type: ignore[assignment]  # as above
    shared_memory_per_block = 227 * 1024  # type: ignore[assignment]  # as above
    multiplies_fp8 = True  # type: ignore[assignment]  # as above

    def capture(self, compute: Callable[[], None]) -> Replay:
        """Compute again for a replay: a recording of torch's operations would lack the kernels."""
        self.captured += 1
        return compute


def make_ops(backend: CudaBackend) -> CudaOps:
    device = Interpreted()
    device.free = 2**30 + 2**28
    backend._cuda = device
    dtype = backend.requested_dtype("float32") or "float32"
    return CudaOps(dtype, device, Providers(operations_on(device, dtype, backend.config.kv_cache_dtype)).kernels)


interpreting.hasten()
CudaBackend.make_ops = make_ops  # type: ignore[method-assign]  # for the whole process
