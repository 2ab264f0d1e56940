"""The versions that CI installs are releases that the projects accept."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def test_constraints_pin_every_dependency_within_its_bounds() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    for path in (ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        extras = project.get("optional-dependencies", {})
        installed = ["cpu", "conformance", "otel", "test", "dev", "kernels", *["onnx"] * (path.parent == ROOT)]
        named = [each for extra in installed for each in extras.get(extra, ())]
        for requirement in map(Requirement, (*project["dependencies"], *named)):
            name = canonicalize_name(requirement.name)
            if not name.startswith("fd-"):
                assert requirement.specifier.contains(pins[name]), f"{requirement} of {path}: run nox -s constraints"
