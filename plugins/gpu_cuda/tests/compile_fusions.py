"""Compiles the kernels of fusions with the sizes of real models, for one compute capability; prints the faults."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from compiling import Compiler
from extent import everything
from fd_core.ops.contract import Activation, Heads, Norm, Rope
from fd_core.testing.models.arrays import step_input

from fd_gpu_cuda.kernels.heads import rotate_and_store
from fd_gpu_cuda.kernels.norms import add_norm, add_ranks, gate
from fd_gpu_cuda.kv_cache import CudaLayer

SIXTEEN_BYTES = r"\A(?!(.|\n)*[.]global[^;]*[.]b16)(.|\n)*ld[.]global[^;]*[.]v4[.]b32(.|\n)*st[.]global[^;]*[.]v4[.]b32"
"""Elements of 16 bits are not moved one by one, and some loads and stores take 16 bytes."""


@dataclass(frozen=True)
class Model:
    hidden: int
    heads: int
    kv_heads: int
    d: int
    inner: int
    activation: Activation = "silu"
    head_norms: bool = False
    post_norms: bool = False
    interleaved: bool = False
    rotary: int | None = None


MODELS = {
    "SmolLM2 135M": Model(576, 9, 3, 64, 1536),
    "Llama 8B": Model(4096, 32, 8, 128, 14336),
    "Qwen3 30B-A3B": Model(2048, 32, 4, 128, 768, head_norms=True),
    "Gemma 3 4B": Model(2560, 8, 4, 256, 10240, "gelu_tanh", head_norms=True, post_norms=True),
    "ERNIE 4.5": Model(1024, 16, 2, 128, 3072, interleaved=True),
    "heads of 80, partial": Model(2560, 32, 32, 80, 10240, "gelu", rotary=32),
    "a wide row": Model(16384, 128, 8, 128, 53248),
}
SAMPLE = ("Gemma 3 4B", "ERNIE 4.5")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def launch(model: Model, dtype: torch.dtype, *, fp8: bool) -> None:
    """Make every launch of a layer."""
    x, y = torch.empty(3, model.hidden, dtype=dtype), torch.empty(3, model.hidden, dtype=dtype)
    norm, head_norm = (Norm(torch.empty(width), 1e-6) for width in (model.hidden, model.d))
    post = norm if model.post_norms else None
    add_norm(x, norm)
    add_norm(x, norm, y, post)
    add_norm(x, None, y, post)
    add_norm(x, norm, y, post, torch.zeros(2, dtype=torch.int32))
    gate(torch.empty(3, 2 * model.inner, dtype=dtype), model.activation)
    add_ranks(torch.empty(8, 3 * model.hidden, dtype=dtype))
    angles = torch.empty(64, (model.rotary or model.d) // 2)
    norms = (head_norm, head_norm) if model.head_norms else (None, None)
    heads = Heads(model.heads, model.kv_heads, model.d, 0.1, Rope(angles, angles, model.interleaved), *norms)
    step: Any = step_input([(1, 3), (2, 4)], 16, torch.zeros(2, 1, dtype=torch.int32).numpy())
    placed = {name: torch.from_numpy(getattr(step, name)) for name in ("kv_slots", "positions")}
    for name, array in placed.items():
        object.__setattr__(step, name, array)
    qkv = torch.empty(3, (model.heads + 2 * model.kv_heads) * model.d, dtype=dtype)
    slots = torch.empty(2, 64, model.kv_heads, model.d, dtype=dtype)
    rotate_and_store(qkv, CudaLayer(*slots, 16), heads, step)
    scales = torch.empty(2, 64, model.kv_heads)
    rotate_and_store(qkv, CudaLayer(*slots.to(torch.int8), 16, *scales), heads, step)
    if fp8:
        rotate_and_store(qkv, CudaLayer(*slots.to(torch.float8_e4m3fn), 16), heads, step)


def main(capability: int) -> None:
    compiler = Compiler(capability).install()
    for name, model in MODELS.items():
        if not everything() and name not in SAMPLE:
            continue
        for dtype in DTYPES if everything() else DTYPES[:1]:
            compiler.case = f"{name} in {dtype}"
            pairs = "" if model.interleaved else SIXTEEN_BYTES  # neighbours are read one by one
            compiler.wanted = dict.fromkeys(("_add_norm", "_gate", "_add_ranks"), SIXTEEN_BYTES)
            compiler.wanted["_rotate_and_store"] = pairs
            launch(model, dtype, fp8=capability >= 89)
    print("\n".join(compiler.failures))


if __name__ == "__main__":
    main(int(sys.argv[1]))
