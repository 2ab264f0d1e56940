"""Compiles the kernels of a mixture of experts as large as Qwen3-30B-A3B's, for one compute capability.

Prints what is wrong.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from compile_products import FORMS, instruction, part
from compiling import MULTIPROCESSORS, SHARED_MEMORY, Compiler
from extent import everything
from fd_core.ops.contract import Experts

from fd_gpu_cuda.kernels.experts import expert_mixture
from fd_gpu_cuda.kernels.products import ProductDevice, weight_product
from fd_gpu_cuda.packed import StackedExperts

COUNT, HIDDEN, INNER, TOP_K = 128, 2048, 768, 8
SAMPLE = (None,)  # compile_products.py widens weights


def stacked(form: str | None, out: int, inputs: int, dtype: torch.dtype) -> StackedExperts:
    rows = COUNT * out
    weight = torch.empty(rows, inputs, dtype=dtype) if form is None else part(rows, inputs, FORMS[form])
    return StackedExperts(weight, COUNT)


def main(capability: int) -> None:
    compiler = Compiler(capability).install()
    device = ProductDevice(MULTIPROCESSORS[capability], SHARED_MEMORY[capability])
    mixture = expert_mixture(device, weight_product(device))
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if everything() else (torch.bfloat16,)
    for name in (None, *FORMS) if everything() else SAMPLE:
        form = {} if name is None else FORMS[name]
        for dtype in dtypes:
            if form.get("eight") and (dtype != torch.bfloat16 or (form.get("fp8") and capability < 89)):
                continue
            experts = Experts(
                router=torch.empty(COUNT, HIDDEN),
                gate_up=stacked(name, 2 * INNER, HIDDEN, dtype),
                down=stacked(name, HIDDEN, INNER, dtype),
                top_k=TOP_K,
                normalize=True,
            )
            for tokens in (1, 256, 1024, 4096) if everything() else (4096,):
                compiler.case = f"{name or 'not packed'}, {dtype}, {tokens} tokens"
                compiler.wanted = {"_multiply_pairs": instruction(capability, dtype, form)}
                compiler.waits = name is not None  # weights that are widened in registers
                mixture(torch.empty(tokens, HIDDEN, dtype=dtype), experts, "silu", None)
    x = torch.empty(9, HIDDEN, dtype=dtype)
    if everything():  # rows that are no multiple of a step have masks
        odd = stacked(None, 2 * (INNER + 8), HIDDEN, dtype), stacked(None, HIDDEN, INNER + 8, dtype)
        compiler.case, compiler.wanted = "masked, float32", {}
        experts = Experts(experts.router, *odd, top_k=TOP_K, normalize=True)
        mixture(x, experts, "silu", None)
    if everything():
        compiler.case = "without a gate"
        mixture(
            x,
            replace(experts, gate_up=stacked(None, experts.down.weight.shape[1], HIDDEN, dtype), ungated="relu2"),
            "silu",
            None,
        )
    compiler.case = f"{compiler.case}, grouped"
    grouped = replace(experts, groups=8, top_groups=4, scoring="sigmoid", correction_bias=torch.empty(COUNT))
    mixture(x, replace(grouped, weighs_inputs=True), "silu", None)
    print("\n".join(compiler.failures))


if __name__ == "__main__":
    main(int(sys.argv[1]))
