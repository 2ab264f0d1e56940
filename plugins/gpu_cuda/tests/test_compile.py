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
from fd_gpu_cuda.kernels import attention

POINTERS = {"query_start_at": "*i32", "context_at": "*i32", "tables_at": "*i32", "seeds_at": "*i64",
            "positions_at": "*i32", "chosen_at": "*i32", "logits_at": "*fp32", "temperature_at": "*fp32"}

def build(kernel, element, device=80, types={}, options={}, **constants):
    signature = {name: "constexpr" if name in constants else types.get(name) or POINTERS.get(name)
                 or ("*" + element if name.endswith("_at") else "fp32" if name in ("scale", "softcap") else "i32")
                 for name in kernel.arg_names}
    even = {(place,): [["tt.divisibility", 16]] for place, (name, kind) in enumerate(signature.items())
            if kind[0] == "*"}
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

ATTENTION = """
sizes = dict(block_size=32, heads=32, shared=4, width=128, capped=True, d=128)
build(attention._attend, "bf16", single=True, tile=1, m=16, n=64, **sizes)
build(attention._attend, "bf16", single=False, tile=16, m=64, n=64, **sizes)
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
    compiled(ATTENTION, tmp_path)
