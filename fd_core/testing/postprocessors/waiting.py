"""Sees whether somebody waits for the device: reading an array on the host fails while `no_waiting` is entered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final
from unittest.mock import patch

from fd_core.ops.contract import Array, Ops
from fd_core.testing.schedulers.breaches import broken

__all__ = ["no_waiting"]

_READS: Final = (
    *("__array__", "__bool__", "__complex__", "__float__", "__index__", "__int__", "__dlpack__"),
    *("cpu", "get", "item", "masked_select", "nonzero", "numpy", "tolist", "unique"),
)
"""Methods of arrays, whatever the framework, whose answer the host needs."""


@contextmanager
def no_waiting(ops: Ops, array: Array) -> Iterator[None]:
    """Break rule 1 where the pack or an array of the class of `array` is asked for values on the host.

    The classes of some frameworks, such as numpy's, cannot be changed: there it is the pack alone that is watched, and
    the host has the values anyway. On CUDA torch itself looks for waits of every kind.
    """
    with ExitStack() as stack:
        for owner, names in ((type(ops), ("to_host", "fetch")), (type(array), ("__getitem__", *_READS))):
            for name in filter(partial(hasattr, owner), names):
                refuse = _refusing(f"{owner.__name__}.{name}", getattr(owner, name) if name == "__getitem__" else None)
                try:
                    stack.enter_context(patch.object(owner, name, refuse))
                except TypeError:
                    break
        if getattr(array, "is_cuda", False) and (torch := sys.modules.get("torch")) is not None:
            before = torch.cuda.get_sync_debug_mode()
            stack.callback(torch.cuda.set_sync_debug_mode, before)
            torch.cuda.set_sync_debug_mode("error")
        yield


def _refusing(name: str, index: Callable[[Any, Any], Any] | None) -> Callable[..., Any]:
    """Return a method that refuses to be called; indexing refuses masks alone, whose size the host has to know."""

    def refuse(array: Any, *key: Any, **_: Any) -> Any:
        keys = key[0] if key and isinstance(key[0], tuple) else key
        if index is None or any("bool" in str(getattr(each, "dtype", "")) for each in keys):
            broken("1", f"the host waits for the device, in {name}")
        return index(array, *key)

    return refuse
