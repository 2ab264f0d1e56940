"""Properties and rates of a CUDA device by itself: bandwidth, products, launches, and kernels by their names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

import torch

__all__ = ["chip_of", "device_facts", "device_rates", "kernel_times", "timed"]

_SMALL = 1024
_NODES = 256


def chip_of(name: str) -> str:
    """Return the key of `roofline.CHIPS` for the driver's name of a device, "" if there is none."""
    return next((chip for chip in ("h100", "h200") if chip in name.lower() and "pcie" not in name.lower()), "")


def device_facts() -> dict[str, Any]:
    """Return the properties of device 0 and the versions of driver and libraries."""
    properties = torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability(0)
    return {
        "device": torch.cuda.get_device_name(0),
        "capability": f"{major}.{minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def timed(work: Callable[[], Any], repeats: int, wait: Callable[[], None]) -> float:
    """Return seconds of one `work`, the median of five rounds of `repeats` queued ones, after one that warms up."""
    work()
    wait()
    rounds = []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        wait()
        rounds.append((time.perf_counter() - begun) / repeats)
    return median(rounds)


def device_rates(copied: int = 1 << 30, width: int = 8192) -> dict[str, float]:
    """Measure the constants of the roofline: bytes and operations per second, and seconds of launches."""
    wait = torch.cuda.synchronize
    source = torch.zeros(copied, dtype=torch.uint8, device="cuda")
    copying = timed(partial(torch.empty_like(source).copy_, source), 20, wait)
    a = torch.randn(width, width, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(width, width, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    multiplying = timed(lambda: torch.mm(a, b, out=product), 20, wait)
    small = torch.zeros(_SMALL, device="cuda")

    def some() -> None:
        for _ in range(_NODES):
            small.add_(1.0)

    eager = timed(some, 5, wait) / _NODES
    few, many = _graph_of(small, 1), _graph_of(small, _NODES)
    one = timed(few, 1, wait)
    node = (timed(many, 1, wait) - one) / (_NODES - 1)
    return {
        "bandwidth": 2 * copied / copying,
        "bf16_operations": 2 * width**3 / multiplying,
        "eager_launch_s": eager,
        "graph_and_one_node_s": one,
        "node_s": node,
    }


def _graph_of(small: Any, nodes: int) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            small.add_(1.0)
    replay: Callable[[], None] = graph.replay
    return replay


def kernel_times(work: Callable[[], Any], steps: int) -> list[dict[str, Any]]:
    """Return the kernels of `work`, which computes `steps` steps: name, launches and seconds a step, longest first.

    A device that torch's profiler cannot look into gives none.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return _by_name(profile.events(), steps)


def _by_name(events: Iterable[Any], steps: int) -> list[dict[str, Any]]:
    found: dict[str, list[float]] = {}
    for event in events:
        if str(getattr(event, "device_type", "")).endswith("CUDA"):
            found.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e6)
    rows = [
        {"kernel": name, "launches": len(seconds) / steps, "seconds": sum(seconds) / steps}
        for name, seconds in found.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])
