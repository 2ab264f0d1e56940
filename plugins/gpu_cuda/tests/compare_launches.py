"""Launch a kernel with arguments of all kinds, by the plugin's launcher and by Triton, and compare what was chosen.

Nothing is compiled: each combination of types, constants and options has a double of a compiled kernel. Prints the
number of launches, how many Triton looked up, and the ones whose kernel differs from Triton's own choice.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
import triton
import triton.language as tl
from fake_driver import FakeDriver
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fd_gpu_cuda.kernels.entry import kernel

launched: list[Any] = []


class Compiled(CompiledKernel):  # type: ignore[misc]
    """A double of a compiled kernel, which notes its launches."""

    function = packed_metadata = None
    asm = {"ptx": ""}  # noqa: RUF012 - a double

    def __init__(self, key: Any) -> None:
        self.key = key

    def __del__(self) -> None:
        pass

    def _init_handles(self) -> None:
        pass

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *given: Any) -> None:
        values = [each.data_ptr() if isinstance(each, torch.Tensor) else repr(each) for each in given[9:]]
        launched.append((self.key, given[:3], values))


def _compile(self: Any, key: Any, signature: Any, device: int, *_: Any) -> Compiled:
    made = Compiled(str(key))
    self.device_caches[device][0][key] = made
    return made


def _function(x_at, y_at, count, factor, tile: tl.constexpr, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x_at + tl.arange(0, tile), factor)


def main() -> None:
    driver.set_active(FakeDriver())
    JITFunction._do_compile = _compile
    looked_up: list[Any] = []
    ours, theirs = kernel(_function), triton.jit(_function)
    triton_run = ours.run._launch

    def look_up(*given: Any, warmup: bool, **named: Any) -> Any:
        if not warmup:
            looked_up.append(given)
        return triton_run(*given, warmup=warmup, **named)

    ours.run._launch = look_up
    base = torch.zeros(64)
    tensors = [base, base[1:], base[4:], base.to(torch.float16), base.to(torch.int32), None]
    counts = [0, 1, 2, 15, 16, 17, -16, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63, True, False]
    constants = [{"tile": 16, "kind": "a"}, {"tile": 16, "kind": None}, {"kind": "a", "tile": 16, "num_warps": 8}]
    constants += [{"tile": 1, "kind": 1}, {"tile": 1, "kind": True}]
    different, total = [], 0
    for x, y, count, factor, given in itertools.product(tensors[:4], tensors, counts, (0.5, 1, 2), constants):
        for grid in ((3,), (3, 2), (3, 2, 4)) if total % 7 == 0 else ((3,),):
            launched.clear()
            ours[grid](x, y, count, factor, **given)
            theirs[grid](x, y, count, factor, enable_fp_fusion=True, **given)
            total += 1
            if launched[0] != launched[1]:
                different.append(str(launched))
    print(json.dumps([total, len(looked_up), different[:3]]))


if __name__ == "__main__":
    main()
