"""A stream for copies beside the steps, and the memory that belongs to it: tests put another one there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from fd_core.ops.contract import Array


class CopyLane:
    """A stream for copies, with memory that belongs to them; waiting for it lets other threads run."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # such as the zeros of a cache
        self._done = torch.cuda.Event(blocking=True)  # a thread that waits sleeps instead of turning

    def pinned(self, shape: Sequence[int], dtype: Any) -> Array:
        """Allocate host memory that the device reads and writes itself."""
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Allocate device memory of this stream."""
        with torch.cuda.stream(self._stream):
            return torch.empty(*shape, dtype=dtype, device=self._device)

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Return a context whose work goes to this stream, in order."""
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._done.record(self._stream)

    def wait(self) -> None:
        """Wait for what was queued; at once if nothing was."""
        self._done.synchronize()
