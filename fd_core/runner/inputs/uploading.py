"""Values made of host arrays, and the same values on the device: a step gathers all of them, and uploads once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import Array, Ops

__all__ = ["uploaded"]

_Value = TypeVar("_Value")

_STAYS: Final = "host"
"""Name of the field whose arrays stay on the host, as that of `StepInput`."""


def uploaded(value: _Value, ops: Ops) -> _Value:
    """Return a value with its numpy arrays on the device, all in one upload.

    A value is an array, a dataclass or a tuple of values; anything else stays what it is, arrays of a device as well.
    """
    arrays: list[npt.NDArray[Any]] = []
    _gather(value, arrays)
    result: _Value = _rebuilt(value, iter(ops.upload(arrays)))
    return result


def _gather(value: object, arrays: list[npt.NDArray[Any]]) -> None:
    if isinstance(value, np.ndarray):
        arrays.append(value)
    elif isinstance(value, tuple):
        for each in value:
            _gather(each, arrays)
    else:
        for name in _names(value):
            if name != _STAYS:
                part = getattr(value, name)
                if part is not None:
                    _gather(part, arrays)


def _rebuilt(value: object, found: Iterator[Array]) -> Any:
    if isinstance(value, np.ndarray):
        return next(found)
    if isinstance(value, tuple):
        return tuple([_rebuilt(each, found) for each in value])
    if not (names := _names(value)):
        return value
    parts = []
    for name in names:
        part = getattr(value, name)
        parts.append(part if part is None or name == _STAYS else _rebuilt(part, found))
    return type(value)(*parts)


def _names(value: object) -> tuple[str, ...]:
    """Return the fields of a value that is a dataclass; of anything else none."""
    return _names_of(type(value))  # type: ignore[arg-type]  # mypy takes it for unhashable


@cache
def _names_of(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else ()
