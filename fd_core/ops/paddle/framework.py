"""Paddle, imported without what that does to a process: warnings of its tools, and signal handlers of its own."""

from __future__ import annotations

import signal
import threading
import warnings
from typing import Any, Final

import numpy.typing as npt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import paddle

__all__ = ["free_device_memory", "paddle", "set_threads", "tensor_of"]

_TAKEN_SIGNALS: Final = (
    signal.SIGTERM,
    signal.SIGSEGV,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGABRT,
    signal.SIGBUS,
)


def _give_signals_back() -> None:
    """Let Paddle handle no signal, and Python again those that it handled before.

    Only the main thread can do the latter; elsewhere the signals are the system's until someone sets a handler.
    """
    paddle.disable_signal_handler()
    if threading.current_thread() is threading.main_thread():
        for number in _TAKEN_SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) or handler is signal.SIG_IGN:
                signal.signal(number, handler)


def free_device_memory(device: str) -> int:
    """Return the bytes of a device, not the processor, that this process has not taken; others are not seen."""
    total = paddle.device.get_device_properties(device).total_memory
    return max(int(total) - int(paddle.device.get_device_module(device).memory_reserved()), 0)


def tensor_of(array: npt.NDArray[Any], place: Any) -> Any:
    """Return a tensor on a place with the values of an array; uint16 is taken for bfloat16.

    Paddle's own `to_tensor` keeps some 100 bytes of the host for each array, for ever; filling a tensor keeps none.
    """
    tensor = paddle.empty(array.shape, str(array.dtype))
    tensor.get_tensor().set(array, place)
    return tensor


def set_threads(count: int) -> None:
    """Let products on the processor use `count` threads."""
    paddle.base.core.set_num_threads(count)


_give_signals_back()
