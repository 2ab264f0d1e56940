"""Upload values made of host arrays: all arrays of a step go to the device at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import Array, HostStep, Ops

_Value = TypeVar("_Value")


def uploaded(value: _Value, ops: Ops) -> _Value:
    """Return a value with its numpy arrays on the device, all in one upload; a pack on the host gets it as it is.

    A value is an array, a dataclass or a tuple of values; anything else stays what it is: arrays of a device, and
    `HostStep`.
    """
    if ops.on_host:
        return value
    arrays: list[npt.NDArray[Any]] = []
    _gather((value,), arrays)
    result: _Value = _replaced((value,), iter(ops.upload(arrays)))[0]
    return result


def _gather(parts: Iterable[Any], arrays: list[npt.NDArray[Any]]) -> None:
    for part in parts:
        if isinstance(part, np.ndarray):
            arrays.append(part)
        elif isinstance(part, tuple):
            _gather(part, arrays)
        elif (parts_of := _parts_of(part.__class__)) is not None:
            _gather(parts_of(part), arrays)


def _replaced(parts: Iterable[Any], found: Iterator[Array]) -> list[Any]:
    """Return the parts, each array replaced by the next one found."""
    replaced = []
    for part in parts:
        if isinstance(part, np.ndarray):
            part = next(found)
        elif isinstance(part, tuple):
            part = tuple(_replaced(part, found))
        elif (parts_of := _parts_of(part.__class__)) is not None:
            part = part.__class__(*_replaced(parts_of(part), found))
        replaced.append(part)
    return replaced


@cache
def _parts_of(kind: type) -> attrgetter[tuple[Any, ...]] | None:
    """Return what reads all fields of a dataclass, at least two; None for any other type, and for `HostStep`."""
    return attrgetter(*(each.name for each in fields(kind))) if is_dataclass(kind) and kind is not HostStep else None
