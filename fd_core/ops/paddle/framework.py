"""Import of Paddle without side effects on the process: warnings of its tools, and its signal handlers."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy.typing as npt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import paddle

__all__ = ["free_device_memory", "measured_memory", "paddle", "require_views", "set_threads", "tensor_of"]

_log = logging.getLogger(__name__)
_VIEWS: Final = "FLAGS_use_stride_kernel"

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


def measured_memory(device: str, steps: AbstractContextManager[None]) -> int:
    """Return the device memory in bytes that entering `steps` takes at most and leaving it frees again.

    Raises `MemoryError` if they do not fit.
    """
    module = paddle.device.get_device_module(device)
    module.empty_cache()
    module.reset_max_memory_reserved()
    with steps:
        peak = int(module.max_memory_reserved())
    module.empty_cache()
    return max(peak - int(module.memory_reserved()), 0)


def require_views() -> None:
    """Enable views of tensors, which write KV, and try one on the current device. Raises `RuntimeError` if it fails."""
    if not paddle.get_flags(_VIEWS)[_VIEWS]:
        _log.warning("%s=0 is ignored: KV is written through views", _VIEWS)
        paddle.set_flags({_VIEWS: True})
    tensor, words = paddle.zeros([2, 2]), paddle.full([1, 2], 0x3F800000, "int32")
    try:
        paddle.scatter_(tensor.view("int32"), paddle.ones([1], "int64"), words)
        written = tensor.numpy().tolist()
    except Exception as error:
        raise RuntimeError(f"a view of a float32 tensor as int32, which {_VIEWS}=1 enables, fails: {error}") from error
    if written != [[0, 0], [1, 1]]:
        raise RuntimeError(f"a view of a float32 tensor as int32 does not share its memory: wrote 1, read {written}")


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
