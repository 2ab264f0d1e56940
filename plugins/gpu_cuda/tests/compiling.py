"""Compiles the launches of functions without a GPU, and checks the machine code.

For scripts that run in a process of their own, without TRITON_INTERPRET; a test starts them with `compiled`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from extent import everything
from fake_driver import FakeDriver, options_of
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from fd_gpu_cuda.kernels.entry import leaking_lane

SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes that a block may have, by compute capability."""
MULTIPROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132}


def capabilities() -> tuple[int, ...]:
    """Return the compute capabilities for which kernels are compiled: of a sample that of an H100."""
    return (80, 89, 90) if everything() else (90,)


class Compiler(FakeDriver):
    """Compiles every launch once, and reports faults of the machine code."""

    def __init__(self, capability: int) -> None:
        super().__init__(capability, compiles=True)
        CUDABackend.make_cubin = lambda *_: b""  # assembled once, by `assembler_log`
        self._capability = capability
        self.case = ""
        self.wanted: dict[str, str] = {}
        """By kernel the pattern of an instruction that has to be there."""
        self.spills = 0
        """Bytes of registers that may go to memory."""
        self.waits = False
        """True if products may wait for each other, where no form was found in which they do not."""

    def _compile(self, kernel: Any, asked: dict[str, Any], name: str) -> None:
        options = options_of(asked)
        source = ASTSource(kernel, asked["signature"], asked["constants"], asked["configs"][0])
        label = f"sm_{self._capability}, {self.case}, {name}"
        try:
            made = triton.compile(source, target=self._target, options=options)
        except Exception as error:  # noqa: BLE001 - the test reports any error
            self.failures.append(f"{label}: {type(error).__name__}: {error}")
            return
        log = assembler_log(made, self._capability)
        shared, spilled = made.metadata.shared, stack(log)
        if shared > SHARED_MEMORY[self._capability]:
            self.failures.append(f"{label}: needs {shared} bytes of shared memory")
        if spilled > self.spills:
            self.failures.append(f"{label}: {spilled} bytes of registers go to memory")
        if (slow := re.search(r"\(C75\d\d\)[^\n]*", log)) and not self.waits:
            self.failures.append(f"{label}: {slow[0]}")
        if register := leaking_lane(made.asm["ptx"]):
            self.failures.append(f"{label}: an unused lane reaches {register}")
        wanted = self.wanted.get(kernel.fn.__name__, "")
        if not re.search(wanted, made.asm["ptx"]):
            self.failures.append(f"{label}: no instruction {wanted}")
        for pointer in overwritten_too_early(made.asm["ttir"]):
            self.failures.append(f"{label}: {pointer} is written while other threads may still read it")


def overwritten_too_early(code: str) -> list[str]:
    """Return single numbers of Triton's code that are loaded and then stored without a barrier in between.

    Every thread of a program loads such a number, and one thread stores it. So the others may load what it stored.
    """
    loaded, found = set[str](), []
    for line in code.splitlines():
        if made := re.match(r"\s*(%[\w#]+)(:\d+)? = ", line):
            loaded.discard(made[1])  # blocks next to each other reuse names
        if "barrier" in line:
            loaded.clear()
        elif load := re.search(r"= tt[.]load (%[\w#]+).* : !tt[.]ptr<", line):
            loaded.add(load[1])
        elif (store := re.search(r"tt[.]store (%[\w#]+),.* : !tt[.]ptr<", line)) and store[1] in loaded:
            found.append(store[1])
    return found


def assembler_log(made: Any, capability: int) -> str:
    """Return the messages of ptxas about the machine code, such as C7515: products wait for each other.

    Not by Triton, whose releases differ in how they show its messages.
    """
    options = [] if made.metadata.enable_fp_fusion else ["--fmad=false"]
    architecture = f"--gpu-name=sm_{capability}{'a' if capability == 90 else ''}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        tools = Path(triton.__file__).parent / "backends/nvidia/bin"
        # Releases differ in the one they use; the older one reads only older code.
        for ptxas in (tools / "ptxas", tools / "ptxas-blackwell"):
            command = [ptxas, "-lineinfo", "-v", *options, architecture, file.name, "-o", os.devnull]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode == 0:
                return run.stderr
    raise RuntimeError(run.stderr)


def stack(log: str) -> int:
    """Return the bytes of registers that do not fit: they are kept on the stack of the machine code."""
    found = re.search(r"(\d+) bytes stack frame", log)
    assert found, log
    return int(found[1])


def compiled(script: str, folder: Path, *words: str) -> None:
    """Run another script of this folder; its output is the list of faults."""
    here = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "TRITON_DEFAULT_FP_FUSION": "0"}
    command = [sys.executable, str(here / script), *words]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert not run.stdout.strip(), run.stdout[-6000:]
