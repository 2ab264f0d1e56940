"""Each fault in the kernels must change a row's bits or differ from the oracle.

The session `mutants` runs this file; the catalogue's other mutants are faults in Python, which need no compiler.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from fd_core.ops.native import build
from fd_core.ops.native.library import declare
from fd_core.ops.native.pack import NativeOps
from tests.mutants.kernel_faults import KERNEL_FAULTS
from tests.mutants.mutant import Mutant
from tests.ops.native.test_attention import SHARED, SPAN, compare_bits, compare_with_oracle


class Kernels:
    """The sources with a fault, compiled separately; units without it are compiled once."""

    def __init__(self, folder: Path, compiler: str) -> None:
        """Compile the fault-free sources in `folder`."""
        self._folder = folder
        self._linked = 0
        # Not optimized: that does not change the results.
        self._command = [compiler, *(flag for flag in build.compiler_flags("native") if flag != "-O3"), "-O1"]
        sources = folder / "ops" / "native" / "csrc"
        shutil.copytree(build._SOURCES, sources)
        self._units = {source.stem: self._compile(source) for source in sources.rglob("*.cpp")}

    def link(self, **changed: Path) -> ctypes.CDLL:
        """Return the library with changed sources for some units."""
        self._linked += 1
        library = self._folder / f"{self._linked}.so"  # loading a name again returns the earlier library
        units = self._units | {name: self._compile(source) for name, source in changed.items()}
        subprocess.run([*self._command, "-shared", *units.values(), "-o", library], check=True)
        return declare(ctypes.CDLL(str(library)))

    def _compile(self, source: Path) -> Path:
        unit = source.with_suffix(".o")
        subprocess.run([*self._command, "-I", build._SOURCES, "-c", source, "-o", unit], check=True)
        return unit


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    return Kernels(tmp_path_factory.mktemp("kernels"), compiler)


def examine(library: ctypes.CDLL) -> None:
    """Compare rows' bits over threads and batches, and values with the oracle."""

    def native(dtype: str, threads: int = 1) -> NativeOps:
        return NativeOps(library, dtype, threads)

    compare_with_oracle(native, "float32", "auto")
    compare_bits(native, "float32", "auto", [*SHARED[:2], 3 * SPAN + 40], None, (1, 2))


def test_kernels_without_a_fault_pass(kernels: Kernels) -> None:
    examine(kernels.link())


@pytest.mark.parametrize("fault", KERNEL_FAULTS, ids=lambda each: each.name)
def test_fault_in_merging_spans_is_detected(kernels: Kernels, fault: Mutant, tmp_path: Path) -> None:
    shutil.copytree(build._SOURCES, tmp_path / "ops" / "native" / "csrc")
    fault.apply(tmp_path)
    library = kernels.link(**{Path(edit.file).stem: tmp_path / edit.file for edit in fault.edits})
    with pytest.raises(AssertionError):
        examine(library)
