"""A distribution has its version in one place; everything else that names it agrees."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

import fd_core
from fd_core.hookspecs import CONTRACT_VERSION

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
PACKAGES = {"fd_core": ROOT, **{f"fd_{folder.name}": folder for folder in PLUGINS}}


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


@pytest.mark.parametrize("package", PACKAGES)
def test_version_is_defined_in_the_package_only(package):
    folder = PACKAGES[package]
    settings = project(folder)
    assert settings["project"]["dynamic"] == ["version"] and "version" not in settings["project"]
    home = settings["tool"]["hatch"]["version"]["path"]
    assert home == f"{package}/__init__.py"
    assert len(re.findall(r'^__version__ = "\d+\.\d+\.\d+((a|b|rc)\d+)?"$', (folder / home).read_text(), re.M)) == 1
    assert isinstance(importlib.import_module(package).__version__, str)
    others = [path for path in (folder / package).rglob("*.py") if path != folder / home]
    assert not [
        path for path in others if re.search(r"^_*version_* *(: *\w+)? *= *[\"']\d", path.read_text(), re.M | re.I)
    ]


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_plugin_requires_an_existing_core_version(folder):
    wanted = [each for each in project(folder)["project"]["dependencies"] if each.startswith("fd-core")]
    core = tuple(int(part) for part in fd_core.__version__.split(".")[:2])
    (least,) = re.findall(r"^fd-core>=(\d+)\.(\d+)$", wanted[0])
    assert len(wanted) == 1 and tuple(map(int, least)) <= core


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_plugins_implement_the_contract_of_the_core(folder):
    assert importlib.import_module(f"fd_{folder.name}").FD_CONTRACT == CONTRACT_VERSION


@pytest.mark.parametrize("package", PACKAGES)
def test_distribution_has_complete_metadata(package):
    folder = PACKAGES[package]
    metadata = project(folder)["project"]
    assert metadata["license"] == "Apache-2.0" and metadata["license-files"] == ["LICENSE"]
    assert metadata["description"].endswith(".") and len(metadata["keywords"]) >= 5
    assert "Typing :: Typed" in metadata["classifiers"] and (folder / package / "py.typed").is_file()
    # No host of the project exists that a link could lead to.
    assert "urls" not in metadata
