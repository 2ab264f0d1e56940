"""What is wrong with installed plugins, each inspected in a process of its own, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from fd_core.cli.plugins.plugin_inspection import Finding, Inspection
from fd_core.errors import ConfigError, PluginError
from fd_core.hookspecs import ENTRY_POINT_GROUP
from fd_core.plugins import Plugins

_TIMEOUT: Final = 60
"""Seconds that a plugin has to be imported and asked."""


class Checked(msgspec.Struct, frozen=True):
    """A plugin and what was seen of it."""

    distribution: str
    version: str
    entry_point: str
    """As in the metadata, `name = module`; empty if there is none."""
    seen: Inspection

    def called(self, name: str) -> bool:
        """Whether a user may mean it by `name`: the entry point, the distribution or something that it offers."""
        return name in (self.entry_point.split(" ")[0], *self.seen.names) or _same(name, self.distribution)

    def paragraphs(self) -> list[str]:
        """Return a paragraph for each thing that is wrong: where, what, and what to do."""
        where = f"{self.distribution} {self.version}"
        if self.entry_point:
            where += f", entry point {self.entry_point}"
        return [
            f"{where}{', ' if finding.about else ''}{finding.about}: {finding.cause}. What to do: {finding.hint}."
            for finding in self.seen.findings
        ]

    def with_findings(self, more: Iterable[Finding]) -> Checked:
        """Return the same with more that is wrong."""
        return replace(self, seen=replace(self.seen, findings=(*self.seen.findings, *more)))


def check_plugins(name: str | None = None) -> list[Checked]:
    """Inspect the installed plugins; return all, or those called `name`.

    Raises `PluginError` if no plugin is called so, `ConfigError` if a part of the core is.
    """
    points = sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=str)
    checked = _with_contested_names([_checked(point) for point in points])
    if name is None:
        return checked
    return [each for each in checked if each.called(name)] or [_without_entry_point(name, checked)]


def _checked(point: EntryPoint) -> Checked:
    distribution, version = (point.dist.name, point.dist.version) if point.dist else ("unknown distribution", "?")
    return Checked(distribution, version, f"{point.name} = {point.value}", _inspect_apart(distribution, point.name))


def _inspect_apart(distribution: str, entry_point: str) -> Inspection:
    """Inspect a plugin in a process of its own, with this one's import path."""
    command = [sys.executable, "-P", "-m", "fd_core.cli.plugins.plugin_inspection", distribution, entry_point]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    hint = "its own code does this while it is imported or asked: install another version of it or ask its maker"
    try:
        ended = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return Inspection(findings=(Finding(f"it did not answer in {_TIMEOUT} seconds", hint),))
    try:
        return msgspec.json.decode(ended.stdout, type=Inspection)
    except msgspec.DecodeError:
        words = ended.stderr.decode(errors="replace").split()
        said = f", and its last words were: {' '.join(words[-30:])}" if words else ""
        return Inspection(findings=(Finding(f"it ended the process with code {ended.returncode}{said}", hint),))


def _with_contested_names(checked: Sequence[Checked]) -> list[Checked]:
    """Add to each plugin what is wrong with names that others offer as well."""
    core = Plugins.discover([])
    givers: dict[str, list[str]] = {}
    for origin in core.origins:
        for offer in core.offers(origin):
            givers.setdefault(offer.label, []).append(origin.distribution)
    for each in checked:
        for label in each.seen.offers:
            givers.setdefault(label, []).append(each.distribution)
    hint = "a name that two plugins offer is given to neither: uninstall one of them, or rename your own"
    return [
        each.with_findings(
            Finding(f"the name is offered by {' and '.join(givers[label])}", hint, label)
            for label in each.seen.offers
            if len(givers[label]) > 1
        )
        for each in checked
    ]


def _without_entry_point(name: str, checked: Sequence[Checked]) -> Checked:
    """Explain why no plugin is called `name`: its distribution may be there without an entry point."""
    for guess in (name, f"fd-{name}"):
        try:
            version = importlib.metadata.version(guess)
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
        if _same(guess, "fd-core"):
            break
        group = f"project.entry-points.{ENTRY_POINT_GROUP}"
        cause = f"it is installed but has no entry point in group {ENTRY_POINT_GROUP}, so it is no plugin"
        hint = f"if it is meant to be one, name its module under [{group}] in its pyproject.toml and install it again"
        return Checked(guess, version, "", Inspection(findings=(Finding(cause, hint),)))
    core = Plugins.discover([])
    if any(offer.name == name for origin in core.origins for offer in core.offers(origin)):
        raise ConfigError(f"{name} comes with fd_core itself; this command checks installed plugins", field="NAME")
    there = ", ".join(each.distribution for each in checked) or "none"
    raise PluginError(f"no plugin called {name!r} is installed", field="NAME", hint=f"there are: {there}")


def _same(name: str, other: str) -> bool:
    """Whether two names of distributions are the same to installers."""
    return re.sub(r"[-_.]+", "-", name).lower() == re.sub(r"[-_.]+", "-", other).lower()
