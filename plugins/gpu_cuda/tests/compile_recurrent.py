"""Compiles the kernels of recurrent layers as large as those of models, for one capability; prints the faults."""

from __future__ import annotations

import sys
from typing import Any

import torch
from compiling import Compiler
from extent import everything
from fd_core.ops.contract import Norm, Recurrent
from fd_core.testing.models.arrays import step_input

from fd_gpu_cuda.kernels.recurrent import recur
from fd_gpu_cuda.kv_cache import CudaLayer

SIZES: dict[str, tuple[Any, ...]] = {
    "Qwen3-Next": ("delta", 4, 16, 32, 128, 128),
    "Granite 4 H": ("scan", 4, 1, 128, 128, 64),
    "Nemotron-H": ("scan", 4, 8, 128, 128, 80),
    "states of 256": ("scan", 4, 1, 32, 256, 64),
    "LFM2": ("gate", 3, 0, 0, 0, 0),
}
SAMPLE = ("Qwen3-Next", "Granite 4 H")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def launch(size: tuple[Any, ...], dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Make every launch of a layer."""
    rule, taps, key_heads, heads, key_dim, value_dim = size
    channels = 2 * key_heads * key_dim + heads * value_dim or 2048
    vector = torch.empty(max(heads, 1))
    norm = Norm(torch.empty(value_dim if rule == "delta" else heads * value_dim), 1e-6) if heads else None
    skip = vector if rule == "scan" else None
    bias = None if rule == "delta" else torch.empty(channels)
    recurrent = Recurrent(
        rule, torch.empty(taps, channels), bias, key_heads, heads, key_dim, value_dim, vector, vector, norm, skip
    )
    state, journal = recurrent.sizes
    size = -(-(state + 16 * journal) // 256 // 16) * 16  # 2 sides, 2 KV heads of 256 bytes
    step: Any = step_input([(1, 3), (2, 4)], size, torch.zeros(2, 1, dtype=torch.int32).numpy())
    for name in ("query_start", "context_len", "kv_slots", "block_tables"):
        object.__setattr__(step, name, torch.from_numpy(getattr(step, name)))
    slots = torch.empty(2, 2 * size, 2, 256 // kv_dtype.itemsize, dtype=kv_dtype)
    scales = torch.empty(2, 2 * size, 2) if kv_dtype == torch.int8 else ()
    recur(torch.empty(3, recurrent.inputs, dtype=dtype), recurrent, CudaLayer(*slots, size, *scales), step)


def main(capability: int) -> None:
    compiler = Compiler(capability).install()
    for name, size in SIZES.items():
        if not everything() and name not in SAMPLE:
            continue
        for dtype in DTYPES if everything() else DTYPES[:1]:
            for kv_dtype in (dtype, torch.int8) if everything() else (dtype,):
                compiler.case = f"{name} in {dtype} over {kv_dtype}"
                compiler.spills = 0 if capability == 90 else 8
                launch(size, dtype, kv_dtype)
    print("\n".join(compiler.failures))


if __name__ == "__main__":
    main(int(sys.argv[1]))
