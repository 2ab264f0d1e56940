import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fd_core.ops.native import build, load_native_ops
from tests.ops.native.conftest import SETS


def test_cache_folder_follows_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("FD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.library_folder() == tmp_path / "xdg" / "fd_core" / "native"
    monkeypatch.setenv("FD_CACHE", str(tmp_path / "own"))
    assert build.library_folder() == tmp_path / "own" / "native"


def test_library_name_depends_on_flags():
    assert build.library_path("avx2") != build.library_path("avx512")


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("FD_ISA", "abacus", "FD_ISA='abacus' is unknown; use one of native"),
        ("CXX", "/nowhere/c++", "no C++ compiler"),
        ("CXX", "false", "did not compile"),
    ],
)
def test_build_failure_logs_one_line_and_disables_pack(monkeypatch, tmp_path, caplog, variable, value, reason):
    monkeypatch.setenv("FD_CACHE", str(tmp_path))
    monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.WARNING):
        assert load_native_ops("float32", 1) is None
    messages = [record.message for record in caplog.records if record.name.startswith("fd_core")]
    assert len(messages) == 1
    assert "native kernels are unavailable" in messages[0] and reason in messages[0]
    assert "\n" not in messages[0]


def test_disk_full_while_compiling_is_reported(monkeypatch, tmp_path, caplog):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho \"x.s: Fatal error: can't write: 'No space left on device'\" >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("FD_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    assert load_native_ops("float32", 1) is None
    assert f"no disk space to compile them in {tmp_path / 'native'}" in caplog.text
    assert "set FD_CACHE and TMPDIR to folders on another disk" in caplog.text


def test_unsupported_instruction_set_is_rejected(monkeypatch):
    monkeypatch.setattr(build, "_processor", lambda: "flags\t\t: fpu avx2 fma")
    with pytest.raises(build.BuildError, match="FD_ISA='amx', but the CPU lacks amx_int8"):
        build.load("amx")


def test_library_of_the_package_needs_no_compiler(monkeypatch, tmp_path):
    """The fastest set that the CPU has is loaded, and no other CPU changes its name."""
    compiled, runnable = Path(build.load()._name), [isa for isa in build.PORTABLE if not build.missing(isa)]
    monkeypatch.setattr(build, "_PACKAGED", tmp_path)
    monkeypatch.setenv("FD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.delenv("FD_ISA", raising=False)
    for isa in (build.PORTABLE[-1], runnable[0]):
        path = build.library_path(isa, tmp_path)
        shutil.copy(compiled, path)
        assert build.load()._name == str(path)
        with monkeypatch.context() as patch:
            patch.setattr(build, "_processor", lambda: "another")
            assert build.library_path(isa, tmp_path) == path
    for path in tmp_path.glob("*.so"):
        path.rename(path.with_name("fd_native-of-other-sources.so"))
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.load()


def test_only_portable_sets_join_the_package():
    with pytest.raises(build.BuildError, match="'native' is not an instruction set; choose from amx"):
        build.add_to_package("native")


def test_unknown_set_on_the_command_line_is_one_line():
    command = [sys.executable, "-m", build.__name__, "avx2", "sse9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{build.__name__}: 'sse9' is not an instruction set; choose from amx")


# The default run compiles the `amx` tiles below; `nox -s sanitize` also compiles each set as a whole.
@pytest.mark.slow
@pytest.mark.parametrize("isa", [pytest.param(isa, marks=pytest.mark.soak) for isa in build.INSTRUCTION_SETS])
def test_unavailable_instruction_set_compiles(isa, tmp_path):
    if isa in SETS:
        pytest.skip("runs here: every test of the kernels has it as a parameter")
    if (lacking := build.missing(isa)) is None:
        pytest.skip("is what `native` resolves to on this processor")
    compiler = shutil.which("c++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip(f"the processor lacks {lacking}, and there is no compiler for it")
    flags = [flag for flag in build.compiler_flags(isa) if flag != "-O3"]
    folder = Path(build.__file__).parent / "csrc"
    subprocess.run(
        [compiler, *flags, "-O0", "-I", folder, "-c", *sorted(folder.rglob("*.cpp"))],
        check=True,
        timeout=200,
        cwd=tmp_path,
    )


def test_amx_tiles_compile_to_amx_instructions(tmp_path):
    """No test machine may have AMX; results are tested by emulation."""
    compiler = shutil.which("c++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs a compiler for x86-64")
    folder, text = Path(build.__file__).parent / "csrc", tmp_path / "packed.s"
    flags = [*build.compiler_flags("amx"), "-O1", "-I", folder]
    subprocess.run([compiler, *flags, "-S", folder / "linear" / "packed.cpp", "-o", text], check=True, timeout=120)
    assert {"tdpbsud", "tileloadd", "tilestored"} <= set(text.read_text().split())


def test_unwritable_cache_folder_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "native").write_text("a file where the folder should be")
    monkeypatch.setenv("FD_CACHE", str(tmp_path))
    assert load_native_ops("float32", 1) is None


COMPILER = """#!/bin/sh
echo "$*" >> {log}
while [ "$1" != -o ]; do shift; done
sleep 0.5
echo 'int fd_usable(void) {{ return 1; }}' | cc -x c -shared -fPIC - -o "$2"
"""


def test_concurrent_processes_compile_once(tmp_path):
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)
    code = "import logging; logging.basicConfig(level=20); from fd_core.ops.native import build; build.load()"
    environment = {**os.environ, "FD_CACHE": str(tmp_path), "CXX": str(compiler)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    logs = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], logs
    assert sum(" -shared " in line or line.startswith("-shared ") for line in log.read_text().splitlines()) == 1
    assert sorted("compiling kernels for" in each for each in logs) == [
        False,
        True,
    ]
    assert [path.suffix for path in sorted((tmp_path / "native").iterdir())] == [".lock", ".so"]
