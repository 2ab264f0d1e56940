"""The Triton kernels compile for GPUs; Triton needs none for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

CODE = """
import re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from fd_gpu_cuda.kernels import attention, products, sampling

POINTERS = {"query_start_at": "*i32", "context_at": "*i32", "tables_at": "*i32", "seeds_at": "*i64",
            "positions_at": "*i32", "chosen_at": "*i32", "logits_at": "*fp32", "temperature_at": "*fp32",
            "scales_at": "*fp16", "minima_at": "*fp16", "bias_at": "*fp32", "x_scales_at": "*fp32"}
LARGE = ("x_stride", "values_stride", "y_stride", "inputs", "group")  # multiples of 16 in a model

def build(kernel, element, device=80, types={}, options={}, **constants):
    signature = {name: "constexpr" if name in constants else types.get(name) or POINTERS.get(name)
                 or ("*" + element if name.endswith("_at") else "fp32" if name in ("scale", "softcap") else "i32")
                 for name in kernel.arg_names}
    even = {(place,): [["tt.divisibility", 16]] for place, (name, kind) in enumerate(signature.items())
            if kind[0] == "*" or name in LARGE}
    made = compile(ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=even),
                   target=GPUTarget("cuda", device, 32), options=options)
    assert made.asm["ptx"] and made.metadata.shared < 99 * 1024, made.metadata.shared
    return made

def stack(made):
    # Registers that do not fit are kept on the stack of the machine code, for which Triton chose the assembler.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([dump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\\d+)", said)[1])
"""

ATTENTION_AND_SAMPLING = """
sizes = dict(block_size=32, heads=32, shared=4, width=128, capped=True, d=128)
build(attention._attend, "bf16", single=True, tile=1, m=16, n=64, **sizes)
build(attention._attend, "bf16", single=False, tile=16, m=64, n=64, **sizes)
build(sampling._sample, "fp32", tile=1024)
"""

PRODUCTS = """
tile = dict(n=64, m=128, options=dict(num_warps=8, num_stages=3))
common = dict(has_minima=False, grouped=False, has_bias=False, middle=0, fp8=False, eight=False, bits=8)
forms = {
    "4 bits": ("bf16", "u8", "bf16", dict(bits=4, grouped=True, has_minima=True, has_bias=True, k=32)),
    "int8": ("i8", "i8", "s8", dict(eight=True, k=128)),
    "fp8": ("fp8e4nv", "fp8e4nv", "e4m3", dict(fp8=True, eight=True, grouped=True, k=128)),
    "fp8, widened": ("bf16", "u8", "bf16", dict(fp8=True, grouped=True, k=64)),
}
for device, names in ((80, ("4 bits", "int8", "fp8, widened")), (89, ("fp8",)), (90, ("4 bits", "int8", "fp8"))):
    instruction = "wgmma[.]mma_async" if device == 90 else "mma[.]sync"
    for name in names:
        x, values, multiplied, form = forms[name]
        types = {"x_at": "*" + x, "values_at": "*" + values}
        made = build(products._multiply, "bf16", device, types, **common | tile | form)
        assert re.search(instruction + "[^;]*[.]" + multiplied, made.asm["ptx"]), (device, name, "no tensor cores")
        assert stack(made) == 0, (device, name, "spills registers")
for device, whole, stored in ((80, True, "i8"), (89, False, "fp8e4nv")):
    types = {"values_at": "*" + stored, "scales_at": "*fp32"}
    build(products._quantize, "bf16", device, types, whole=whole, tile=1024)
"""


def compiled(code: str, folder: Path) -> None:
    """Compile in a process of its own, without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    run = subprocess.run(
        [sys.executable, "-c", CODE + code], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    compiled(ATTENTION_AND_SAMPLING, tmp_path)


def test_products_with_packed_weights_take_the_tensor_cores_of_each_device(tmp_path: Path) -> None:
    """Of each kind the tile of many tokens, which needs the most registers: none of them go to memory.

    What is compiled for compute capability 8.0 runs on 8.9 as well, which multiplies FP8 besides.
    """
    compiled(PRODUCTS, tmp_path)
