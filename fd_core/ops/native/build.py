"""Compile the C++ sources once for this CPU and cache the library in a folder, unless the package has one for it.

`python -m fd_core.ops.native.build ISA...` adds libraries of instruction sets to the package, as images do; `all`, or
no name, stands for those of the architecture.

The compiler works in a private folder; the finished library is renamed into place atomically. Concurrent builds of the
same library serialize on a file lock that the system releases when a process dies, so a killed build never blocks
others.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fd_core.config.paths import find_cache_dir

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_COMPILE_SECONDS = 300.0
# Hidden, so that symbols do not clash between libraries of several instruction sets in one process.
_COMMON_FLAGS = tuple(
    """
    -std=c++17 -O3 -fno-math-errno -fno-trapping-math -fPIC -fvisibility=hidden -pthread
    """.split()
)
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c")
_AVX512_BF16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16")  # which imply each other
_ISA_FLAGS = {
    "native": ("-march=native",),
    "native_without_amx": ("-march=native", "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8"),
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avx_vnni": ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "generic": (),
    # Intel's tile instructions in plain C++: slow, to test the code that uses them.
    "amx_emulated": ("-march=native", "-DFD_AMX_EMULATED"),
}
INSTRUCTION_SETS = tuple(isa for isa in _ISA_FLAGS if isa != "native_without_amx")
"""Valid values of FD_ISA."""
PORTABLE = tuple(isa for isa in INSTRUCTION_SETS if isa not in ("native", "amx_emulated"))
"""Sets that do not depend on the compiling CPU, the fastest first."""
_PACKAGED = Path(__file__).parent / "libraries"
_NEEDED = {"amx": "amx_int8", "avx512": "avx512bw"} | {
    isa: isa for isa in ("avx512_bf16", "avx512_vnni", "avx_vnni", "avx2")
}
"""Linux's name of the newest instructions of a set."""


class BuildError(Exception):
    """The library cannot be built or used; the message is a one-line reason."""


def library_folder() -> Path:
    """Return the folder of compiled libraries, in the cache folder."""
    return find_cache_dir() / "native"


def load(isa: str | None = None) -> ctypes.CDLL:
    """Return the library for this CPU, compiling it if it is neither in the package nor cached.

    `isa`, or FD_ISA, overrides the best instruction set of the CPU. Raises `BuildError`.
    """
    isa = isa or os.environ.get("FD_ISA") or "native"
    if isa not in _ISA_FLAGS:
        raise BuildError(f"FD_ISA={isa!r} is unknown; use one of {', '.join(_ISA_FLAGS)}")
    if lacking := missing(isa):
        raise BuildError(f"FD_ISA={isa!r}, but the CPU lacks {lacking}")
    wanted = [each for each in PORTABLE if not missing(each)] if isa == "native" else [isa]
    for each in wanted:
        if (path := library_path(each, _PACKAGED)).exists() and (library := ctypes.CDLL(str(path))).fd_usable():
            return library
    library = _load(isa)
    if library.fd_usable():
        return library
    logger.info("the system denies AMX tiles to this process; building kernels without them")
    return _load("native_without_amx")


def obtainable() -> bool:
    """Return True if the package has a library, or there is a compiler for one; loads and compiles none."""
    return any(_PACKAGED.glob("*.so")) or shutil.which(_compiler()) is not None


def missing(isa: str) -> str | None:
    """Return the instructions of a set that the CPU lacks, or None."""
    needed = _NEEDED.get(isa)
    return None if needed is None or needed in _processor().split() else needed


def compiler_flags(isa: str) -> tuple[str, ...]:
    """Return the compiler flags for an instruction set, including FD_CXXFLAGS."""
    return (*_COMMON_FLAGS, *_ISA_FLAGS[isa], *shlex.split(os.environ.get("FD_CXXFLAGS", "")))


def library_path(isa: str, folder: Path | None = None) -> Path:
    """Return the path of an instruction set's library, named by sources, flags and, unless it is portable, CPU.

    `folder` is that of compiled libraries by default.
    """
    digest = hashlib.sha256()
    for source in sorted(path for path in _SOURCES.rglob("*") if path.is_file()):
        digest.update(source.relative_to(_SOURCES).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join((*compiler_flags(isa), "" if isa in PORTABLE else _processor())).encode())
    return (folder or library_folder()) / f"fd_native-{isa}-{digest.hexdigest()[:16]}.so"


def _load(isa: str) -> ctypes.CDLL:
    path = library_path(isa)
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    logger.info("waiting for another process that compiles the kernels for this CPU")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    _compile(isa, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path}: {error}") from error


def _processor() -> str:
    """Return the CPU properties on which `-march=native` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return "\n".join(next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags"))


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _compile(isa: str, path: Path) -> None:
    name = _compiler()
    compiler = shutil.which(name)
    if compiler is None:
        what = "set CXX to an installed one" if "CXX" in os.environ else "install one, such as `apt-get install g++`"
        raise BuildError(f"no C++ compiler ({name}) was found; {what}")
    meant = "this processor" if isa == "native" else isa
    logger.info("compiling kernels for %s, once, for about a minute; cached in %s", meant, path.parent)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder, ThreadPoolExecutor() as pool:

        def compiled(source: Path) -> Path:
            unit = Path(folder, source.stem + ".o")
            _run([compiler, *compiler_flags(isa), "-I", _SOURCES, "-c", source, "-o", unit])
            return unit

        library = Path(folder, path.name)
        units = pool.map(compiled, sorted(_SOURCES.rglob("*.cpp")))
        _run([compiler, *compiler_flags(isa), "-shared", *units, "-o", library])
        library.replace(path)
    logger.info("compiled the kernels in %.0f s", time.monotonic() - begun)


def _run(command: list[str | Path]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        raise BuildError(f"the C++ sources did not compile within {_COMPILE_SECONDS:.0f} s") from None
    if done.returncode != 0:
        output = done.stdout + done.stderr
        if os.strerror(errno.ENOSPC) in output:
            raise BuildError(
                f"no disk space to compile them in {library_folder()} and {tempfile.gettempdir()}; "
                "remove files there, or set FD_CACHE and TMPDIR to folders on another disk"
            )
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        first = next((line for line in lines if "error:" in line), lines[-1] if lines else "no message")
        raise BuildError(f"the C++ sources did not compile: {first}")


def add_to_package(*names: str) -> None:
    """Compile libraries of portable instruction sets into the package, `all` for those of this architecture.

    Raises `BuildError`.
    """
    if names in ((), ("all",)):
        names = PORTABLE if platform.machine() == "x86_64" else ("generic",)
    for isa in names:
        if isa not in PORTABLE:
            raise BuildError(f"{isa!r} is not an instruction set; choose from {', '.join(PORTABLE)}")
    for isa in names:
        _PACKAGED.mkdir(exist_ok=True)
        _compile(isa, library_path(isa, _PACKAGED))


if __name__ == "__main__":
    try:
        add_to_package(*sys.argv[1:])
    except BuildError as error:
        sys.exit(f"fd_core.ops.native.build: {error}")
