"""LoRA products on the CPU, which read the tables at each replay."""

from __future__ import annotations

import ctypes

import capture
import torch
from fd_core.ops.contract import Array

from fd_gpu_cuda.kernel_table import LoraTable


def plain_lora(y: Array, x: Array, table: LoraTable, slots: Array) -> None:
    """Add at once, or at each replay of what is being captured; a capture itself computes nothing on a device."""

    def add() -> None:
        for slot in sorted(set(slots.tolist()) - {0}):
            rows, begin = (slots == slot).nonzero()[:, 0], 0
            for (down, up, rank), out in zip(table.entries[slot - 1].tolist(), table.outs, strict=True):
                if rank:
                    inner = x[rows] @ _matrix(down, rank, table.inputs, x.dtype).T
                    y[rows, begin : begin + out] += inner @ _matrix(up, rank, out, x.dtype)
                begin += out

    recording = getattr(capture._recordings, "current", None)
    if recording is None:
        add()
    else:
        recording.note(add)


def _matrix(address: int, rows: int, columns: int, dtype: torch.dtype) -> Array:
    memory = (ctypes.c_char * (rows * columns * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)
