"""Environment of a measurement: the processor, its memory bandwidth and the versions in use."""

from __future__ import annotations

import os
import platform
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np

_BYTES_PER_THREAD = 256 * 2**20


def describe() -> dict[str, object]:
    """Return processor, cores, memory and system as plain values."""
    return {
        "cpu": cpu_model(),
        "instruction_sets": instruction_sets(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def cpu_model() -> str:
    """Return the processor's name, with family and model where virtual machines hide the name."""
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    family, model = _cpuinfo("cpu family"), _cpuinfo("model\t")
    return f"{name} (family {family}, model {model})" if family else name


def instruction_sets() -> list[str]:
    """Return the vector extensions that kernels use."""
    known = "avx2 avx512f avx512_bf16 avx512_vnni amx_tile amx_bf16 amx_int8 asimd bf16 sve"
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [name for name in known.split() if name in flags]


def load_average() -> float:
    """Return the one-minute load average: well above 0 before a run means that the figures are noisy."""
    return os.getloadavg()[0]


class BandwidthProbe:
    """Reads memory with `threads` threads; 256 MiB each, far more than the caches hold."""

    def __init__(self, threads: int) -> None:
        self._buffers = [np.full(_BYTES_PER_THREAD, i, dtype=np.int8) for i in range(threads)]

    def measure(self, repeats: int = 5) -> float:
        """Return the median read bandwidth of `repeats` passes, in bytes/s."""
        return median(self._one_pass() for _ in range(repeats))

    def _one_pass(self) -> float:
        barrier = threading.Barrier(len(self._buffers) + 1)

        def read(buffer: np.ndarray) -> None:
            barrier.wait()
            buffer.max()  # a vectorised reduction that releases the GIL: bound by memory alone
            barrier.wait()

        readers = [threading.Thread(target=read, args=(b,)) for b in self._buffers]
        for reader in readers:
            reader.start()
        barrier.wait()
        start = time.perf_counter()
        barrier.wait()
        elapsed = time.perf_counter() - start
        for reader in readers:
            reader.join()
        return len(self._buffers) * _BYTES_PER_THREAD / elapsed
