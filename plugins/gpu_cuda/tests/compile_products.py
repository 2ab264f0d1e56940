"""Compiles products with the weights of real models, for one compute capability; prints the faults."""

from __future__ import annotations

import sys
from typing import Any

import torch
from compiling import MULTIPROCESSORS, SHARED_MEMORY, Compiler
from extent import everything

from fd_gpu_cuda.kernels.products import ProductDevice, weight_product
from fd_gpu_cuda.packed import PackedPart

FORMS: dict[str, dict[str, Any]] = {
    "int4, rows": {"bits": 4, "group": 0, "middle": 8},
    "int4 of 32": {"bits": 4, "group": 32, "middle": 8},
    "int4 of 32, minima": {"bits": 4, "group": 32, "minima": True},
    "int4 of 64, minima": {"bits": 4, "group": 64, "minima": True},
    "int4 of 128": {"bits": 4, "group": 128, "middle": 8},
    "int8, rows": {"bits": 8, "group": 0},
    "int8 of 32": {"bits": 8, "group": 32},
    "int8 of 32, minima": {"bits": 8, "group": 32, "minima": True},
    "int8, rows, by int8": {"bits": 8, "group": 0, "eight": True},
    "int8 of 128, by int8": {"bits": 8, "group": 128, "eight": True},
    "fp8, rows": {"bits": 8, "group": 0, "fp8": True},
    "fp8 of 128": {"bits": 8, "group": 128, "fp8": True},
    "fp8, rows, by fp8": {"bits": 8, "group": 0, "fp8": True, "eight": True},
    "fp8 of 128, by fp8": {"bits": 8, "group": 128, "fp8": True, "eight": True},
}
SAMPLE = {"int4 of 32, minima": 2048, "fp8 of 128, by fp8": 1}
"""Formats, and the tokens of their step."""


def part(out: int, inputs: int, form: dict[str, Any]) -> PackedPart:
    group = form["group"] or inputs
    scales = torch.empty(out, inputs // group, dtype=torch.float16)
    values = torch.empty(out, inputs * form["bits"] // 8, dtype=torch.uint8 if form["bits"] == 4 else torch.int8)
    return PackedPart(
        values,
        scales,
        scales.clone() if form.get("minima") else None,
        None,
        form["bits"],
        form.get("fp8", False),
        form.get("middle", 0),
        group,
        inputs,
        form.get("eight", False),
    )


def instruction(capability: int, dtype: torch.dtype, form: dict[str, Any]) -> str:
    """Return a pattern of the tensor cores' instruction; float32 has none that multiplies all of its bits."""
    if dtype == torch.float32:
        return "fma[.]rn"
    kind = "wgmma[.]mma_async" if capability == 90 else "mma[.]sync"
    number = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    if form.get("eight"):
        number = "e4m3" if form.get("fp8") else "s8"
    # Widened values are converted by exact sums, because conversions have a fraction of the rate.
    conversions = "" if form.get("eight") or not form else r"(?s)\A(?!.*cvt[.]rn[.]f32[.][us]).*"
    return f"{conversions}{kind}[^;]*[.]{number}"


def main(capability: int) -> None:
    compiler = Compiler(capability).install()
    product = weight_product(ProductDevice(MULTIPROCESSORS[capability], SHARED_MEMORY[capability]))
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if everything() else (torch.bfloat16,)
    for name in FORMS if everything() else SAMPLE:
        form = FORMS[name]
        for dtype in dtypes:
            exact = form.get("eight", False)
            if exact and (dtype != torch.bfloat16 or (form.get("fp8") and capability < 89)):
                continue
            # Of 8B models: gate and up in one program each, the output projection shared by several.
            for out, inputs, tokens in ((4096, 4096, 1), (4096, 4096, 2048), (28672, 4096, 16), (28672, 4096, 64)):
                if not everything() and (out, tokens) != (4096, SAMPLE[name]):
                    continue
                compiler.case = f"{name}, {dtype}, {tokens} tokens"
                compiler.wanted = {"_multiply": instruction(capability, dtype, form)}
                x = torch.empty(tokens, inputs, dtype=dtype)
                product(x, part(out, inputs, form), x.new_empty(tokens, out))
    compiler.case = "not packed"
    compiler.wanted = {"_multiply": instruction(capability, torch.bfloat16, {})}
    x = torch.empty(2048, 4096, dtype=torch.bfloat16)
    product(x, torch.empty(4096, 4096, dtype=torch.bfloat16), torch.empty_like(x))
    for tokens in (1, 2048) if everything() else ():  # of the sample, compile_experts.py multiplies by one
        compiler.case, compiler.wanted = f"router, {tokens} tokens", {}
        x = torch.empty(tokens, 2048, dtype=torch.bfloat16)
        product(x, torch.empty(128, 2048), torch.empty(tokens, 128))
    print("\n".join(compiler.failures))


if __name__ == "__main__":
    main(int(sys.argv[1]))
