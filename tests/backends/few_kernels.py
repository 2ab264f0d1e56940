"""Pytest plugin that rejects operations of Paddle that not every device supports, according to its XPU sources.

`pytest -p tests.backends.few_kernels --pyargs fd_core.testing.suite --fd-backend=xpu` then proves that the emulated
device needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from sys import maxsize
from typing import Any

from fd_core.ops.paddle.framework import paddle

SORTED_AT_MOST = 16_383
"""Maximum entries of an axis, exclusive: the kernel rejects 16,384."""

SHIFTS = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift")
SHIFTED_AT_MOST = 20_480
"""Maximum entries of an axis: the device supports bool, no integers; small arrays may go through the host."""

SCATTERS = ("scatter", "scatter_", "scatter_nd_add", "put_along_axis", "put_along_axis_", "index_put", "index_put_")


def lacking() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield names in `paddle._C_ops` with functions that compute the same or raise `RuntimeError`."""
    for name in ("cumsum", "cumsum_", "sum", "logcumsumexp"):
        yield name, without(name, "float64")
    for name in SCATTERS:
        yield name, without(name, "bfloat16")
    yield "argsort", without("argsort", most=SORTED_AT_MOST)
    for name in SHIFTS:
        yield name, without(name, most=SHIFTED_AT_MOST)


def without(name: str, dtype: str = "", most: int | None = None) -> Callable[..., Any]:
    """Return an operation that raises for a dtype, or for too many entries in an axis."""
    compute = getattr(paddle._C_ops, name)

    def computed(*arguments: Any, **named: Any) -> Any:
        for value in (*arguments, *named.values()):
            is_tensor = isinstance(value, paddle.Tensor)
            if str(value.dtype if is_tensor else value).removeprefix("paddle.") == dtype:
                raise RuntimeError(f"the device has no kernel {name} of {dtype}")
            if is_tensor and value.dtype != paddle.bool and max(value.shape, default=0) > (most or maxsize):
                raise RuntimeError(f"the device has no kernel {name} of {max(value.shape)} entries")
        return compute(*arguments, **named)

    return computed


def pytest_configure() -> None:
    """Remove the kernels for the whole process."""
    for name, computed in [*lacking()]:
        setattr(paddle._C_ops, name, computed)
