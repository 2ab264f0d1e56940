"""Host arrays on their way to the device: packed into one pinned buffer, which is copied at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from fd_core.ops.contract import Array

from fd_gpu_cuda.device import Cuda

ALIGNMENT: Final = 16
"""Bytes: each array begins at a multiple, as kernels that load 16 bytes at a time want it."""


def upload_packed(cuda: Cuda, arrays: Sequence[npt.NDArray[Any]]) -> list[Array]:
    """Queue one copy of all arrays; returns tensors that share its memory. uint64 becomes int64 with the same bits.

    The memory is free once none of the tensors is left.
    """
    begins, end = [], 0
    for array in arrays:
        begins.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    pinned = cuda.pinned(max(end, ALIGNMENT))
    packed = pinned.numpy()
    for begin, array in zip(begins, arrays, strict=True):
        if array.size:
            packed[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    device = cuda.upload(pinned)
    whole = {dtype: device.view(_torch_dtype(dtype)) for dtype in {array.dtype for array in arrays}}
    return [
        whole[array.dtype].as_strided(array.shape, _strides(array.shape), begin // array.itemsize)
        for begin, array in zip(begins, arrays, strict=True)
    ]


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's name of a dtype; uint64, which torch hardly knows, is int64 there."""
    return torch.int64 if dtype == np.uint64 else torch.from_numpy(np.empty(0, dtype)).dtype


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of an array in C order."""
    if len(shape) == 1:
        return (1,)
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
