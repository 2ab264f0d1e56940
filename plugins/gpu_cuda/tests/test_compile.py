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
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from fd_gpu_cuda.kernels import attention, sampling

POINTERS = {"query_start_at": "*i32", "context_at": "*i32", "tables_at": "*i32", "seeds_at": "*i64",
            "positions_at": "*i32", "chosen_at": "*i32", "logits_at": "*fp32", "temperature_at": "*fp32"}

def build(kernel, element, **constants):
    types = {name: "constexpr" if name in constants else POINTERS.get(name)
             or ("*" + element if name.endswith("_at") else "fp32" if name in ("scale", "softcap") else "i32")
             for name in kernel.arg_names}
    made = compile(ASTSource(fn=kernel, signature=types, constexprs=constants), target=GPUTarget("cuda", 80, 32))
    assert made.asm["ptx"] and made.metadata.shared < 99 * 1024, made.metadata.shared

sizes = dict(block_size=32, heads=32, shared=4, width=128, capped=True, d=128)
build(attention._attend, "bf16", single=True, tile=1, m=16, n=64, **sizes)
build(attention._attend, "bf16", single=False, tile=16, m=64, n=64, **sizes)
build(sampling._sample, "fp32", tile=1024)
"""


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    # A process of its own, without the interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
