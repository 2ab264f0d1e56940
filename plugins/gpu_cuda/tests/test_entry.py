"""Kernels that Triton compiled wrongly are found before they run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from fd_gpu_cuda.kernels import entry

WRONG = """
\tand.b32 \t%r3, %r2, 7;
\tmul.wide.u32 \t%rd80, %r2, 2147483648;
\tcvt.u64.u32 \t%rd81, %r3;
\tshl.b64 \t%rd82, %rd81, 34;
\tor.b64 \t%rd83, %rd80, %rd82;
\tmov.b64 \t{_, %r8}, %rd83;
"""
"""From a product of experts in float32 with Triton 3.6: %r8 should be 4 * %r3."""
RIGHT = WRONG.replace("2147483648", "4")


@pytest.mark.parametrize(
    ("ptx", "register"),
    [
        (WRONG, "%rd83"),
        (WRONG.replace("%rd80, %rd82", "%rd82, %rd80"), "%rd83"),
        (RIGHT, ""),
        (WRONG.replace("or.b64 ", "add.s64 "), ""),  # an offset in memory
        ("", ""),
    ],
)
def test_lane_that_reaches_into_another_is_found(ptx: str, register: str) -> None:
    assert entry.leaking_lane(ptx) == register


@pytest.mark.parametrize(("ptx", "launches"), [(RIGHT, 2), (WRONG, 0)])
def test_wrong_kernel_is_never_launched(ptx: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []

    class Compiled:
        asm = {"ptx": ptx}  # noqa: RUF012 - a double

        def __getitem__(self, grid: Any) -> Any:
            return lambda *given: launched.append((grid, given))

    made = Compiled()

    def run(*given: Any, grid: Any, warmup: bool, **_: Any) -> Compiled:
        if not warmup:
            launched.append((grid, given))
        return made

    monkeypatch.setattr(entry.triton.compiler, "CompiledKernel", Compiled)
    function = SimpleNamespace(run=run, arg_names=["x", "tile"], fn=SimpleNamespace(__name__="_product"))
    launch = entry._Launcher(function)
    for _ in range(2):
        if launches:
            assert launch(7, grid=(3,), tile=16) is made
        else:
            with pytest.raises(RuntimeError, match="compiled _product wrongly"):
                launch(7, grid=(3,), tile=16)
    assert len(launched) == launches
