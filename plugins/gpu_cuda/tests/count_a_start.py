"""Compile a kernel, begin to serve, compile another one, and print the counts and logs of `Compilations`."""

from __future__ import annotations

import json
import logging

import torch
from count_small_kernels import _plain
from fake_driver import FakeDriver
from triton.runtime.driver import driver

from fd_gpu_cuda.compilations import Compilations, use_cache_folder


def main() -> None:
    lines: list[str] = []
    log = logging.getLogger("fd_gpu_cuda.compilations")
    log.setLevel(logging.DEBUG)
    log.addFilter(lambda record: bool(lines.append(f"{record.levelname} {record.getMessage()}")))
    folder = use_cache_folder()
    driver.set_active(FakeDriver())
    counted = Compilations()
    counted.watch()
    _plain.warmup(torch.float32, 7, tile=16, grid=(1,))
    _plain.warmup(torch.float32, 9, tile=16, grid=(1,))
    counted.begin_serving()
    at_start = [counted.compiled, counted.read, counted.stats().serving]
    before = counted.stats()
    _plain.warmup(torch.float32, 7, tile=32, grid=(1,))
    stats = counted.stats()
    assert (before.start, stats.start, before.start_seconds) == (1, 1, stats.start_seconds)
    assert stats.serving_seconds == counted.seconds - stats.start_seconds > 0
    print(json.dumps([str(folder), at_start, [counted.compiled, counted.read, stats.serving], lines]))


if __name__ == "__main__":
    main()
