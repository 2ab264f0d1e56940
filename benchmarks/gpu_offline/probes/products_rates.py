"""Measure products of the sizes of Llama-3.1-8B: bfloat16 by cuBLAS, and packed weights by the plugin's kernels.

    PYTHONPATH=.:plugins/gpu_cuda python benchmarks/gpu_offline/probes/products_rates.py [--kinds int4-32 fp8] [--cpu]

Prints a line of JSON for each product: microseconds, bytes of weights per second, operations per second, the share of
the larger of both floors, the error relative to float32, and if the first token has the bits that it has alone. Kernels
are compiled in one process per kind at first. Weights are made on the device and rotate, so that caches do not hold
them. `--cpu` runs small sizes with torch's operations in place of the kernels, to try the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from fd_gpu_cuda.kernel_table import expanded, expanded_product
from fd_gpu_cuda.packed import PackedPart

SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate-up": (28672, 4096), "down": (4096, 14336)}
SMALL = {"output": (64, 256), "down": (64, 512)}
TOKENS = (1, 16, 32, 128, 512, 2048)
BYTES_A_SECOND, OPERATIONS_A_SECOND = 3.0e12, 798e12
"""Ceilings of an H100 with 16 bits; products of 8 bits may have twice the operations."""
_ROTATED_BYTES = 256 * 2**20
"""More than a cache holds."""
_LAUNCHES = 24


class Kind(NamedTuple):
    """Format of a weight; a group of 0 is a row."""

    bits: int
    group: int = 0
    fp8: bool = False
    eight: bool = False


KINDS: dict[str, Kind | None] = {
    "bf16": None,
    "int4-32": Kind(4, 32),
    "int4-128": Kind(4, 128),
    "int8": Kind(8, eight=True),
    "int8-32": Kind(8, 32),
    "fp8": Kind(8, fp8=True, eight=True),
    "fp8-128": Kind(8, 128, fp8=True, eight=True),
}


def random_part(kind: Kind, out: int, inputs: int, device: torch.device) -> PackedPart:
    """Return random weights: any bytes are values, and their order does not matter here."""
    group = kind.group or inputs
    if kind.fp8:
        values = torch.randn(out, inputs, device=device).to(torch.float8_e4m3fn).view(torch.int8)
    else:
        values = torch.randint(0, 256, (out, inputs * kind.bits // 8), dtype=torch.uint8, device=device)
        values = values.view(torch.int8) if kind.eight else values
    scales = (torch.rand(out, inputs // group, device=device) + 0.5).mul(2.0**-kind.bits / inputs**0.5).half()
    middle = 0 if kind.eight else 2 ** (kind.bits - 1)
    return PackedPart(values, scales, None, None, kind.bits, kind.fp8, middle, group, inputs, kind.eight)


def seconds_of(calls: Sequence[Callable[[], None]], device: torch.device) -> float:
    """Return the seconds of one of some calls, replayed from a graph without the host's time."""
    if device.type == "cpu":
        begun = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begun) / len(calls)
    for call in calls:
        call()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for number in range(_LAUNCHES):
            calls[number % len(calls)]()
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / _LAUNCHES)
    return min(times)


def measure(name: str, product: Any, shapes: dict[str, tuple[int, int]], device: torch.device, *, timed: bool) -> None:
    kind = KINDS[name]
    for where, (out, inputs) in shapes.items():
        torch.manual_seed(0)
        xs = torch.randn(max(TOKENS), inputs, device=device).bfloat16()
        if kind is None:
            weight: Any = (torch.randn(out, inputs, device=device) / inputs**0.5).bfloat16()
            size, whole = weight.nbytes, weight.float()
        else:
            weight = random_part(kind, out, inputs, device)
            size, whole = weight.values.nbytes + weight.scales.nbytes, expanded(weight)
        copies = [weight]
        while timed and device.type != "cpu" and len(copies) * size < _ROTATED_BYTES:
            copies.append(weight.clone() if kind is None else replace(weight, values=weight.values.clone()))
        alone = None
        for tokens in TOKENS:
            x, y = xs[:tokens], torch.empty(tokens, out, dtype=torch.bfloat16, device=device)

            def call(each: Any, x: Any = x, y: Any = y) -> None:
                if kind is None:
                    torch.mm(x, each.t(), out=y)
                else:
                    product(x, each, y)

            call(weight)
            if not timed:
                continue
            right = x.float() @ whole.t()
            alone = y[0].clone() if alone is None else alone
            line = {"kind": name, "product": where, "out": out, "in": inputs, "tokens": tokens}
            line["error"] = round(float((y.float() - right).norm() / right.norm()), 6)
            line["same_bits"] = bool((y[0] == alone).all())
            seconds = seconds_of([lambda each=each: call(each) for each in copies], device)  # type: ignore[misc]
            work = 2 * tokens * out * inputs
            floor = max(size / BYTES_A_SECOND, work / (OPERATIONS_A_SECOND * (2 if kind and kind.eight else 1)))
            line |= {"us": round(seconds * 1e6, 2), "GB_s": round(size / seconds / 1e9)}
            line |= {"TFLOP_s": round(work / seconds / 1e12, 1), "of_floor": round(floor / seconds, 3)}
            print(json.dumps(line), flush=True)
        del whole, copies
    if timed:
        print(json.dumps({"kind": name, "done": True}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--compile", action="store_true", help="run each kernel once, to fill Triton's cache")
    asked = parser.parse_args()
    if asked.cpu:
        for name in asked.kinds:
            measure(name, expanded_product, SMALL, torch.device("cpu"), timed=True)
        return
    begun = time.perf_counter()
    if not asked.compile:
        command = [sys.executable, __file__, "--compile", "--kinds"]
        children = [subprocess.Popen([*command, name]) for name in asked.kinds if KINDS[name] is not None]
        failed = [child.args for child in children if child.wait()]
        print(json.dumps({"compile_seconds": round(time.perf_counter() - begun, 1), "failed": failed}), flush=True)
    from fd_gpu_cuda.device import Cuda
    from fd_gpu_cuda.kernels.products import ProductDevice, weight_product

    cuda = Cuda()
    product = weight_product(ProductDevice(cuda.multiprocessors, cuda.shared_memory_per_block))
    for name in asked.kinds:
        try:
            with torch.inference_mode():
                measure(name, product, SHAPES, cuda.device, timed=not asked.compile)
        except Exception as error:  # noqa: BLE001 - the other kinds are still measured
            print(json.dumps({"kind": name, "failed": f"{type(error).__name__}: {error}"[:600]}), flush=True)
    print(json.dumps({"device": cuda.name, "seconds": round(time.perf_counter() - begun, 1)}), flush=True)


if __name__ == "__main__":
    main()
