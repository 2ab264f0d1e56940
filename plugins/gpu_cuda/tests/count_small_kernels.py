"""Count with `fake_driver` which launches that differ in one property compile again."""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl
from fake_driver import FakeDriver


@triton.jit
def _special(x_at, count, tile: tl.constexpr):
    offset = tl.arange(0, tile)
    tl.store(x_at + offset, 1.0, mask=offset < count)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["x_at"])
def _plain(x_at, count, tile: tl.constexpr):
    offset = tl.arange(0, tile)
    tl.store(x_at + offset, 1.0, mask=offset < count)


def main() -> None:
    fake = FakeDriver(compiles=True).install()
    x = torch.zeros(64)
    found = {}
    for kernel in (_special, _plain):
        counts = []
        for view, count, tile in ((x, 1, 16), (x, 7, 16), (x, 32, 16), (x, 48, 16), (x[1:], 7, 16), (x, 7, 32)):
            before = len(fake.compiled)
            kernel[(1,)](view, count, tile=tile)
            counts.append(len(fake.compiled) - before)
        found[kernel.fn.__name__] = counts
    print(json.dumps([found, fake.failures, fake.launches, x.sum().item()]))


if __name__ == "__main__":
    main()
