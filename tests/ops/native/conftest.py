import ctypes
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from fd_core.ops.native import build
from fd_core.ops.native.library import declare
from fd_core.ops.native.pack import NativeOps
from fd_core.testing.kit.growth import one_torch_thread
from tests.models.conftest import tiny  # noqa: F401  # a fixture

RUNNABLE = [isa for isa in build.INSTRUCTION_SETS if not build.missing(isa)]
# Sets are ordered from newest to oldest, so the second available one is what `native` resolves to.
SETS = [RUNNABLE[0], *RUNNABLE[2:]]
"""Instruction sets that this processor runs or emulates; test_build.py compiles the others."""
TILES = not build.missing("amx") and ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0
"""True if `native` computes with AMX: Linux permits it to this process, see `amx::request`."""
COVERED = ("avx512", "amx_emulated") if TILES else ("avx512",)
"""Sets whose code other sets have: `avx512` computes as `avx512_vnni` does, but products of bytes as `avx2`, and
`amx_emulated` has the tiles of `native`."""
COMPOSED = ("test_attention.py", "test_fusions.py", "test_models.py", "test_ranks.py")
"""Whole models, layers and ranks."""


@pytest.fixture(scope="session", params=[SETS[0], *(pytest.param(isa, marks=pytest.mark.slow) for isa in SETS[1:])])
def isa(request):
    """Run every test of the native kernels on each instruction set."""
    return request.param


@pytest.fixture(scope="session")
def one_unit(tmp_path_factory):
    """Return a folder with the sources of the kernels in one file, so that each header is compiled only once."""
    folder = tmp_path_factory.mktemp("native") / "csrc"
    shutil.copytree(build._SOURCES, folder, ignore=shutil.ignore_patterns("*.cpp"))
    units = sorted(build._SOURCES.rglob("*.cpp"))
    (folder / "kernels.cpp").write_text("".join(f'#line 1 "{unit.name}"\n{unit.read_text()}' for unit in units))
    return folder


@pytest.fixture(scope="session")
def native(isa, one_unit):
    """Return a function from dtype and threads to a native pack; skips where it cannot be built.

    The first set is compiled as for users, the others as one file and with few optimizations, which takes a third of
    the time. `nox -s conformance` compiles them as for users.
    """
    packs = {}

    def get(dtype="float32", threads=1):
        key = (dtype, threads)
        if key not in packs:
            with pytest.MonkeyPatch.context() as patch:
                if isa != SETS[0]:
                    patch.setenv("FD_CXXFLAGS", f"-O1 {os.environ.get('FD_CXXFLAGS', '')}")
                    patch.setattr(build, "_SOURCES", one_unit)
                try:
                    packs[key] = NativeOps(declare(build.load(isa)), dtype, threads)
                except build.BuildError as error:
                    pytest.skip(f"the native kernels cannot be built here: {error}")
        return packs[key]

    return get


@pytest.fixture(scope="session")
def compiled(isa, tmp_path_factory):
    """Return a function that compiles C functions against the kernel headers, for code without an operation."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")

    def library(includes, functions):
        folder = tmp_path_factory.mktemp("compiled")
        (folder / "functions.cpp").write_text(
            f'{includes}#pragma GCC visibility push(default)\nextern "C" {{\n{functions}}}\n'
        )
        flags = [*build.compiler_flags(isa), "-O1", "-shared", "-I", Path(build.__file__).parent / "csrc"]
        subprocess.run([compiler, *flags, "functions.cpp", "-o", "functions.so"], check=True, timeout=120, cwd=folder)
        return ctypes.CDLL(str(folder / "functions.so"))

    return library


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    with one_torch_thread():
        yield


@pytest.hookimpl(tryfirst=True)  # before the other cases take turns
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move most of the composed tests to `nox -s soak` on all instruction sets but the newest, and all of `COVERED`.

    Tests of single operations and formats run on every other set; each set runs a different sixth of the compositions.
    """
    turns: Counter[tuple[str, str, str]] = Counter()
    for item in items:
        isa = item.callspec.params.get("isa") if hasattr(item, "callspec") else None
        if isa in COVERED and isa != SETS[0]:
            item.add_marker(pytest.mark.soak)
        elif isa in SETS[1:] and item.path.parent == Path(__file__).parent and item.path.name in COMPOSED:
            test = item.path.name, item.originalname, isa
            turns[test] += 1
            if turns[test] % 6 != SETS.index(isa) % 6:
                item.add_marker(pytest.mark.soak)
