"""Recorder of the operations that torch dispatches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch is checked without types
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func.overloadpacket).removeprefix("aten."))
        return func(*args, **kwargs or {})


@contextmanager
def recorded_calls() -> Iterator[list[str]]:
    """Collect the names of torch's operations within the block, views included."""
    with _Recorder() as recorder:
        yield recorder.names
