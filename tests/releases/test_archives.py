"""Faults of a wheel or an sdist are detected; `nox -s build` builds all of them."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.releases.archives import WANTED, distributions, faults, read_archive, tracked

ROOT = Path(__file__).parents[2]
DESCRIPTION = (
    b"Metadata-Version: 2.4\nName: fd-x\nLicense-Expression: Apache-2.0\nRequires-Python: >=3.11\n\nWhat it is.\n"
)
INFO = "fd_x-1.0.dist-info"
WHEEL = {
    "fd_x/__init__.py": b"",
    "fd_x/py.typed": b"",
    f"{INFO}/METADATA": DESCRIPTION,
    f"{INFO}/licenses/LICENSE": b"...",
}
SDIST = {
    "fd_x/__init__.py": b"",
    "fd_x/py.typed": b"",
    "PKG-INFO": DESCRIPTION,
    "LICENSE": b"...",
    "tests/test_x.py": b"",
}
FILES = {"fd_x/__init__.py", "fd_x/py.typed"}


def without(files, name):
    return {each: data for each, data in files.items() if each != name}


@pytest.mark.parametrize(("archive", "files"), [("fd_x.whl", WHEEL), ("fd_x.tar.gz", SDIST)])
def test_valid_archive_has_no_faults(archive, files):
    assert faults("fd_x", archive, files, FILES, "/checkout") == []


@pytest.mark.parametrize(
    ("archive", "files", "fault"),
    [
        ("fd_x.whl", without(WHEEL, "fd_x/py.typed"), "fd_x.whl lacks fd_x/py.typed"),
        ("fd_x.tar.gz", without(SDIST, "fd_x/__init__.py"), "lacks fd_x/__init__.py"),
        ("fd_x.whl", WHEEL | {"fd_x/new.py": b""}, "has fd_x/new.py, which git has not"),
        ("fd_x.whl", WHEEL | {"tests/test_x.py": b""}, "would install tests/test_x.py"),
        ("fd_x.tar.gz", SDIST | {"tests/__pycache__/x.pyc": b""}, "which a build or a test left"),
        ("fd_x.whl", WHEEL | {"fd_x/__init__.py": b"'/home/alice/x'"}, "names /home/alice/"),
        ("fd_x.whl", WHEEL | {"fd_x/__init__.py": b"'/checkout/x'"}, "names /checkout"),
        ("fd_x.whl", without(WHEEL, f"{INFO}/licenses/LICENSE"), "has no licence"),
        ("fd_x.tar.gz", SDIST | {"PKG-INFO": DESCRIPTION.partition(b"\n\n")[0]}, "lacks Requires-Python"),
    ],
)
def test_fault_is_named(archive, files, fault):
    assert [each for each in faults("fd_x", archive, files, FILES, "/checkout") if fault in each]


def test_archives_are_read_without_the_folder_on_top(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("fd_x/a.py", b"1")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as sdist:
        member = tarfile.TarInfo("fd_x-1.0/fd_x/a.py")
        member.size = 1
        sdist.addfile(member, io.BytesIO(b"1"))
    assert read_archive(tmp_path / "a.whl") == read_archive(tmp_path / "a.tar.gz") == {"fd_x/a.py": b"1"}


def test_core_and_every_plugin_are_built():
    found = {each.package: each for each in distributions(ROOT)}
    assert len(found) == 1 + len([*ROOT.glob("plugins/*/")])
    assert {f"fd_core/{name}" for name in WANTED["fd_core"]} <= tracked(found["fd_core"])
    assert all(f"{each.package}/py.typed" in tracked(each) for each in found.values())
