"""Count the kernels that a computation would launch on a device, on the CPU.

One launch is counted for each operation of torch that reads or writes elements, and one for each kernel in Triton;
what Triton's interpreter does to run it is not counted. Views, allocations and metadata launch nothing. A product with
a bias is one operation: torch hands a bias of one axis to cuBLASLt, which adds it before it writes. The number is a
lower bound: sorting takes several kernels, and cuBLAS may add up the parts of a product that it splits in a second one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

NO_LAUNCH = ("empty", "new_empty", "set_", "resize_", "lift_fresh", "_unsafe_view", "is_same_size")


class _Operations(TorchDispatchMode):
    """Records the operations of torch that would launch a kernel."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found
        self.interpreting = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").partition(".")[0]
        if not (self.interpreting or func.is_view or name.startswith(NO_LAUNCH)):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[str]]:
    """Collect the names of the launches in the block, in order."""
    from triton.runtime.interpreter import GridExecutor

    found: list[str] = []
    operations, run = _Operations(found), GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(f"triton {self.fn.__name__}")
        before, operations.interpreting = operations.interpreting, True
        try:
            return run(self, *args, **kwargs)
        finally:
            operations.interpreting = before

    with mock.patch.object(GridExecutor, "__call__", launch), operations:
        yield found
