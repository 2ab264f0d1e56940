"""Nested values are uploaded to the device in a single transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fd_core.ops.contract import Array, HostStep
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.runner.inputs.inputs import uploaded
from tests.runner.inputs.test_inputs import ids


class _OnDevice:
    def __init__(self, values: np.ndarray) -> None:
        self.values = values


class _Far(NumpyOps):
    """Device arrays are not numpy arrays."""

    on_host = False
    uploads = 0

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Array]:
        self.uploads += 1
        return [_OnDevice(array.copy()) for array in arrays]


@dataclass(frozen=True)
class _Part:
    ids: Any
    host: HostStep


@dataclass(frozen=True)
class _Whole:
    part: _Part | None
    pairs: tuple[tuple[int, Any], ...]
    count: int
    kept: Any


def test_nested_arrays_share_one_upload() -> None:
    ops, there = _Far(), _OnDevice(ids(7))
    value = _Whole(_Part(ids(1, 2), HostStep(ids(3), ids(4), ids())), ((4, ids(5)), (6, ids())), 8, there)
    found = uploaded(value, ops)
    assert ops.uploads == 1
    assert found.part is not None and value.part is not None
    assert found.part.ids.values.tolist() == [1, 2]
    assert found.part.host is value.part.host
    assert [(index, array.values.tolist()) for index, array in found.pairs] == [(4, [5]), (6, [])]
    assert found.count == 8
    assert uploaded(found, ops) == found


def test_excluded_fields_are_not_uploaded() -> None:
    assert uploaded(_Whole(None, (), 0, None), _Far()) == _Whole(None, (), 0, None)


def test_host_pack_receives_value_unchanged() -> None:
    value = _Whole(None, ((1, ids(2)),), 0, None)
    assert uploaded(value, NumpyOps()) is value
