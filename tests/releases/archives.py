"""Check of the content of wheels and sdists against the files of this repository."""

from __future__ import annotations

import re
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

__all__ = ["Distribution", "distributions", "faults", "read_archive", "tracked"]

WANTED = {
    "fd_core": (
        "py.typed",
        "ops/native/csrc/api.cpp",
        "server/live_page/page.html",
        "http/pages/api_docs/page.html",
        "cli/trace_page/page.html",
        "testing/report/page.html",
        "simulation/costs/profiles/smollm2-cpu.json",
        "cli/plugins/scaffold/templates/plugin.py.tmpl",
    )
}
"""Files other than Python that are needed only at run time; one of each kind."""
PATH_OF_A_MACHINE = re.compile(rb"(?<![\w.])/(?:home|Users|workspace|build|mnt)/\w+/")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Folder that builds into a wheel and an sdist."""

    folder: Path
    package: str

    @property
    def name(self) -> str:
        """Name of the distribution for pip."""
        return self.package.replace("_", "-")


def distributions(root: Path) -> list[Distribution]:
    """Return the core and every plugin of the repository."""
    plugins = sorted(path.parent for path in root.glob("plugins/*/pyproject.toml"))
    return [Distribution(root, "fd_core"), *(Distribution(folder, f"fd_{folder.name}") for folder in plugins)]


def tracked(distribution: Distribution) -> set[str]:
    """Return the tracked and the new files of the package: the expected content of an archive."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", distribution.package)
    listed = subprocess.run(command, cwd=distribution.folder, check=True, capture_output=True, text=True).stdout
    return {line for line in listed.splitlines() if (distribution.folder / line).exists()}


def read_archive(path: Path) -> dict[str, bytes]:
    """Return the files of a wheel or an sdist by name, without the folder that an sdist has on top."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    found = {}
    with tarfile.open(path) as sdist:
        for member in sdist:
            data = sdist.extractfile(member) if member.isfile() else None
            found[member.name.partition("/")[2]] = data.read() if data else b""
    return found


def faults(package: str, archive: str, files: Mapping[str, bytes], wanted: set[str], checkout: str) -> list[str]:
    """Return the faults of an archive, called `archive`, of a package whose files are `wanted`.

    `checkout` is the folder where it was built, whose path no file may hold.
    """
    wheel = archive.endswith(".whl")
    missing = {*wanted, *(f"{package}/{name}" for name in WANTED.get(package, ("py.typed",)))} - set(files)
    found = [f"{archive} lacks {name}" for name in sorted(missing)]
    for name, data in files.items():
        top = name.split("/")[0]
        if name.startswith(f"{package}/") and name not in wanted:
            found.append(f"{archive} has {name}, which git has not")
        if wheel and top != package and not re.fullmatch(rf"{package}-[\w.]+\.dist-info", top):
            found.append(f"{archive} would install {name}")
        if re.search(r"__pycache__|\.(pyc|so|o|orig|rej)$|\.(pytest|mypy|ruff|hypothesis)_cache|(^|/)\.venv/", name):
            found.append(f"{archive} has {name}, which a build or a test left")
        if (local := PATH_OF_A_MACHINE.search(data)) or checkout.encode() in data:
            found.append(f"{archive}: {name} names {local[0].decode() if local else checkout}")
    (described,) = [name for name in files if re.fullmatch(r"PKG-INFO|[^/]+\.dist-info/METADATA", name)]
    metadata = message_from_bytes(files[described])
    licences = [name for name in files if name == "LICENSE" or name.endswith(".dist-info/licenses/LICENSE")]
    if metadata["License-Expression"] != "Apache-2.0" or not licences:
        found.append(f"{archive} has no licence")
    if not metadata["Requires-Python"] or not metadata.get_payload():
        found.append(f"{archive} lacks Requires-Python or a description")
    return found
