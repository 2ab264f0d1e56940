"""Compiles attention with the heads of real models, for one compute capability; prints the faults."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from compiling import MULTIPROCESSORS, SHARED_MEMORY, Compiler
from extent import everything
from fd_core.ops.contract import Heads, KVShape, Rope, StepInput
from processor import Processor

from fd_gpu_cuda.kernels.attention import PagedAttention
from fd_gpu_cuda.kernels.heads import write_kv
from fd_gpu_cuda.kv_cache import CudaKVCache

BLOCKS, BLOCK_SIZE, LONGEST = 4, 16, 32768


@dataclass(frozen=True)
class Case:
    num_heads: int
    num_kv_heads: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    kv: str = "auto"
    window: int | None = None
    softcap: float | None = None
    latent: int = 0


SMOLLM2_135M = Case(9, 3, 64)
LLAMA_3_8B = Case(32, 8, 128)
LLAMA_3_8B_FP8 = Case(32, 8, 128, kv="fp8")
QWEN2_7B = Case(28, 4, 128)
QWEN3_30B = Case(32, 4, 128, kv="int8")
GEMMA_2_9B = Case(16, 8, 256, window=4096, softcap=50.0)
DEEPSEEK_V3 = Case(128, 1, 576, latent=512)
MINICPM3 = Case(40, 1, 288, latent=256)
LATENT_INT8 = Case(16, 1, 576, kv="int8", latent=512)
LATENT_FP8 = Case(16, 1, 576, kv="fp8", latent=512)
LATENT_EXACT = Case(16, 1, 576, torch.float32, latent=512)
SAMPLE = (
    (LLAMA_3_8B, "decode prompt"),
    (QWEN3_30B, "prompt"),
    (DEEPSEEK_V3, "decode"),
    (LLAMA_3_8B_FP8, "decode"),
)
"""Cases and steps."""


def every_case() -> list[Case]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    shapes = product((1, 4, 8), (64, 80, 96, 128, 192, 256), dtypes, ("auto", "int8", "fp8"))
    plain = [Case(8 * shared, 8, width, dtype, kv) for shared, width, dtype, kv in shapes]
    latent = [DEEPSEEK_V3, MINICPM3, LATENT_INT8, LATENT_FP8, LATENT_EXACT]
    others = [SMOLLM2_135M, QWEN2_7B, GEMMA_2_9B]
    return latent + plain + others + [Case(32, 8, width, window=512, softcap=30.0) for width in (64, 128, 256)]


DECODE_SPILLS, PROMPT_SPILLS = 40, 256
"""Bytes of registers. Of decodes, ptxas saves a few values of the share while keys are summed, to fit one more program.
Of prompts before Hopper, sums of all spans wait there while those of one span are computed."""
KINDS = {"decode": (1, 1), "prompt": (1, 512)}
"""Rows and their tokens."""


def step_of(kind: str) -> StepInput:
    rows, width = KINDS[kind]
    start = torch.arange(rows + 1, dtype=torch.int32) * width
    tables = torch.zeros(rows, LONGEST // BLOCK_SIZE, dtype=torch.int32)
    slots = torch.zeros(rows * width, dtype=torch.int32)
    return StepInput(
        token_ids=slots,
        positions=slots,
        kv_slots=slots,
        query_start=start,
        context_len=start[1:],
        block_tables=tables,
        logits_rows=start[1:],
        max_query=width,
        max_context=LONGEST,
    )


def instruction(capability: int, case: Case, *, prefill: bool) -> str:
    """Return a pattern of the tensor cores' instruction; float32 has none that multiplies all of its bits."""
    if case.dtype == torch.float32:
        return "fma[.]rn"
    # Latent values of 512 leave registers for 32 lines, half of what Hopper's instruction takes.
    kind = "wgmma[.]mma_async" if capability == 90 and prefill and case.latent <= 256 else "mma[.]sync"
    number = {torch.bfloat16: "bf16", torch.float16: "f16"}[case.dtype]
    return f"{kind}[^;]*[.]{number}"


def main(capability: int) -> None:
    compiler = Compiler(capability).install()
    attend: Any = PagedAttention(torch.device("cpu"), MULTIPROCESSORS[capability], SHARED_MEMORY[capability])
    every = [(case, "decode prompt") for case in every_case() if case.kv != "fp8" or capability >= 89]
    for case, kinds in every if everything() else SAMPLE:
        shape = KVShape(1, case.num_kv_heads, case.width, BLOCK_SIZE, case.kv, latent=case.latent)
        layer = CudaKVCache(shape, BLOCKS, case.dtype, Processor()).layer(0)
        sizes = (case.num_heads, case.num_kv_heads, case.width)
        heads = Heads(*sizes, 0.1, Rope(None, None), window=case.window, softcap=case.softcap, latent=case.latent)
        compiler.wanted = {
            "_decode": instruction(capability, case, prefill=False),
            "_prefill": instruction(capability, case, prefill=True),
        }
        for name in kinds.split():
            compiler.spills = DECODE_SPILLS if name == "decode" else PROMPT_SPILLS
            if name == "prompt" and capability >= 90:
                # Windowed heads of 256, and latent ones, with Triton 3.9; in FP8, other heads of 256 as well.
                compiler.spills = 56 if case.latent else 24 if case.window is not None else 0
                if case.kv == "fp8" and case.width > 128:
                    compiler.spills = max(compiler.spills, 112)
            compiler.case, step = f"{case}, {name}", step_of(name)
            attend(torch.empty(len(step.kv_slots), case.num_heads, case.width, dtype=case.dtype), layer, heads, step)
        widths = case.width - case.latent, case.latent or case.width
        k, v = (torch.empty(3, case.num_kv_heads, width, dtype=case.dtype) for width in widths)
        write_kv(k, v, layer, torch.zeros(3, dtype=torch.int32))
    print("\n".join(compiler.failures))


if __name__ == "__main__":
    main(int(sys.argv[1]))
