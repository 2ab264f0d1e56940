"""Sees whether somebody waits for the device: reading an array on the host fails while `no_waiting` is entered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final
from unittest.mock import patch

from fd_core.ops.contract import Array, Ops
from fd_core.testing.kit.law import broken

_READS: Final = (
    *("__array__", "__bool__", "__complex__", "__float__", "__index__", "__int__", "__dlpack__", "__getitem__"),
    *("__setitem__", "allclose", "argwhere", "cpu", "equal", "equal_all", "get", "is_nonzero", "item", "masked_select"),
    *("nonzero", "numpy", "to", "tolist", "unique", "unique_consecutive", "where"),
)
"""Methods of arrays and functions on them, whatever the framework, whose answer or whose size the host needs."""


def _indexing(array: Array, key: Any, value: Any = None) -> bool:
    """Whether cells are picked by a mask, whose size has to be counted, or by one number that is on the device."""
    keys = [each for each in (key if isinstance(key, tuple) else (key,)) if isinstance(each, type(array))]
    filling = value is not None and not isinstance(value, type(array))
    return any(not each.shape or ("bool" in str(each.dtype) and not filling) for each in keys)


def _to_host(*arguments: Any, **named: Any) -> bool:
    return "cpu" in [each for each in (*arguments, *named.values()) if isinstance(each, str)]


def _positions(*arguments: Any, **named: Any) -> bool:
    return len(arguments) + len(named) == 1


_ONLY_IF: Final[Mapping[str, Callable[..., bool]]] = {
    "__getitem__": _indexing,
    "__setitem__": _indexing,
    "to": _to_host,
    "where": _positions,
}
"""Methods that wait with some arguments alone."""


@contextmanager
def no_waiting(ops: Ops, array: Array) -> Iterator[None]:
    """Break rule 1 where the pack or an array of the class of `array` is asked for values on the host.

    The classes of some frameworks, such as numpy's, cannot be changed: there it is the pack alone that is watched, and
    the host has the values anyway. On CUDA torch itself looks for waits of every kind.
    """
    framework = sys.modules[type(array).__module__.partition(".")[0]]
    with ExitStack() as stack:
        try:
            for owner, names in ((type(ops), ("to_host", "fetch")), (type(array), _READS), (framework, _READS)):
                for name in filter(partial(hasattr, owner), names):
                    refusing = _refusing(f"{owner.__name__}.{name}", getattr(owner, name), _ONLY_IF.get(name))
                    stack.enter_context(patch.object(owner, name, refusing))
        except TypeError:
            pass  # the class cannot be changed
        if getattr(array, "is_cuda", False) and (torch := sys.modules.get("torch")) is not None:
            before = torch.cuda.get_sync_debug_mode()
            stack.callback(torch.cuda.set_sync_debug_mode, before)
            torch.cuda.set_sync_debug_mode("error")
        yield


def _refusing(name: str, right: Callable[..., Any], only_if: Callable[..., bool] | None) -> Callable[..., Any]:
    def refuse(*arguments: Any, **named: Any) -> Any:
        if only_if is None or only_if(*arguments, **named):
            broken("1", f"the host waits for the device, in {name}")
        return right(*arguments, **named)

    return refuse
