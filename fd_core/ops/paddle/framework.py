"""Import of Paddle without side effects on the process: warnings of its tools, and its signal handlers."""

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
    """Remove Paddle's signal handlers, and restore those of Python.

    Only the main thread can restore them; in others, the signals have the default action until a handler is set.
    """
    paddle.disable_signal_handler()
    if threading.current_thread() is threading.main_thread():
        for number in _TAKEN_SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) or handler is signal.SIG_IGN:
                signal.signal(number, handler)


def free_device_memory(device: str) -> int:
    """Return the device memory not allocated by this process, in bytes; other processes are not visible."""
    total = paddle.device.get_device_properties(device).total_memory
    return max(int(total) - int(paddle.device.get_device_module(device).memory_reserved()), 0)


def tensor_of(array: npt.NDArray[Any], place: Any) -> Any:
    """Return a tensor on a device with the values of an array; uint16 is interpreted as bfloat16.

    Paddle's `to_tensor` leaks about 100 bytes of host memory per array; filling a tensor does not.
    """
    tensor = paddle.empty(array.shape, str(array.dtype))
    tensor.get_tensor().set(array, place)
    return tensor


def set_threads(count: int) -> None:
    """Set the number of CPU threads of matrix products."""
    paddle.base.core.set_num_threads(count)


_give_signals_back()
