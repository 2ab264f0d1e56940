"""Folders with distributions of plugins, sound and broken, as an installer would leave them."""

from __future__ import annotations

import importlib.metadata
import textwrap
import tomllib
from pathlib import Path

from fd_core.hookspecs import ENTRY_POINT_GROUP
from fd_core.plugins import Plugins

GOOD = """
from fd_core.hookspecs import Entry, hookimpl
FD_CONTRACT = 1

@hookimpl
def fd_register_backends():
    return [Entry({name!r}, "{module}_parts:Chip", "a chip")]
"""

PARTS = """
from fd_core.backends.contract import Availability, Backend

class Chip(Backend):
    name = "chip"
    auto_rank = {rank}

    @classmethod
    def probe(cls):
        return {answer}

    def make_ops(self): ...
    def free_memory(self): ...
"""


class Site:
    """A folder of distributions with entry points."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, distribution: str, source: str, *, entry_point: str | None = None, **more: str) -> None:
        module = distribution.replace("-", "_")
        entry_point = entry_point or module.removeprefix("fd_")
        for name, text in {module: source, **{f"{module}_{key}": text for key, text in more.items()}}.items():
            (self.folder / f"{name}.py").write_text(textwrap.dedent(text))
        info = self.folder / f"{module}-2.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{entry_point} = {module}\n")

    def chip(self, distribution: str, *, offers: str, rank: int = 0, answer: str = "Availability(True, 'it is here')"):
        module = distribution.replace("-", "_")
        self.install(
            distribution, GOOD.format(name=offers, module=module), parts=PARTS.format(rank=rank, answer=answer)
        )

    def discover(self) -> Plugins:
        found = importlib.metadata.distributions(path=[str(self.folder)])
        return Plugins.discover([point for dist in found for point in dist.entry_points])


def installed(project: Path) -> None:
    """Write the installed metadata of a project's `pyproject.toml` next to its package, for its import path."""
    settings = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    name, version = settings["name"], settings["version"]
    info = project / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = "\n".join(f"{point} = {module}" for point, module in settings["entry-points"][ENTRY_POINT_GROUP].items())
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{points}\n")
