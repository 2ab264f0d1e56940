"""Compiles the LoRA kernels with the linears of real models, for one compute capability; prints the faults."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from compiling import Compiler
from extent import everything
from processor import PLAIN, Processor

from fd_gpu_cuda.kernel_table import AdapterCapacity
from fd_gpu_cuda.kernels.lora import lora_addition
from fd_gpu_cuda.ops import CudaOps

LINEARS = {
    "queries, keys and values of 8B": (4096, (4096, 1024, 1024)),
    "down of 8B": (14336, (4096,)),
    "gate and up of a rank's uneven share": (576, (510, 510)),
    "inputs that are no whole steps": (1100, (300,)),
}
SAMPLE = ("queries, keys and values of 8B",)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SIXTEEN_BYTES = r"(ld[.]global[^;]*[.]v4[.]b32|cp[.]async[.]c[ga][.]shared[.]global [^;]*0x10)"


def main(capability: int) -> None:
    compiler = Compiler(capability).install()
    for name, (inputs, outs) in LINEARS.items():
        if not everything() and name not in SAMPLE:
            continue
        for dtype in DTYPES[: 3 if everything() else 1]:
            for rank in (64, 16, 512) if everything() else (64,):
                compiler.case = f"{name} in {dtype}, rank {rank}"
                aligned = all(width % 16 == 0 for width in (inputs, *outs))
                compiler.wanted = {"_shrink": SIXTEEN_BYTES, "_expand": SIXTEEN_BYTES} if aligned else {}
                compiler.spills = 16  # two registers of a thread, for strided or 32-bit pieces
                ops = CudaOps(str(dtype).removeprefix("torch."), Processor(), replace(PLAIN, lora=lora_addition()))
                ops.adapter_capacity = AdapterCapacity(8, rank)
                table = ops.place_loras([None], inputs, outs)
                kernel = ops._kernels.lora
                assert kernel is not None
                x, y = torch.empty(3, inputs, dtype=dtype), torch.empty(3, sum(outs), dtype=dtype)
                kernel(y, x, table, torch.zeros(3, dtype=torch.int32))
    print("\n".join(compiler.failures))


if __name__ == "__main__":
    main(int(sys.argv[1]))
