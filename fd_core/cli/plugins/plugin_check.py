"""Diagnosis of installed plugins, each inspected in a separate process, with remedies."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from fd_core.errors import ConfigError, PluginError
from fd_core.hookspecs import ENTRY_POINT_GROUP
from fd_core.plugins import BACKEND, POSTPROCESS, PluginOffer, Plugins

_FRAMEWORKS: Final = set(
    """
    cupy flashinfer jax numba onnx onnxruntime paddle tensorflow torch transformers triton vllm
    """.split()
)


class Finding(msgspec.Struct, frozen=True):
    """One problem."""

    cause: str
    hint: str
    about: str = ""
    """Kind and name of the entry concerned, such as `backend mychip`; empty for the whole plugin."""


class Inspection(msgspec.Struct, frozen=True):
    """Result of the inspection of one plugin."""

    offers: tuple[str, ...] = ()
    """Kinds and names, such as `backend mychip`."""
    names: tuple[str, ...] = ()
    """The same without their kinds."""
    answers: tuple[str, ...] = ()
    """Availability of each backend here, as it reports it."""
    findings: tuple[Finding, ...] = ()


class _Watch:
    """Detects frameworks that are imported and threads that are started; each is reported once."""

    def __init__(self) -> None:
        self._frameworks, self._threads = _FRAMEWORKS & sys.modules.keys(), set(threading.enumerate())

    def since(self, what: str, hint: str, about: str = "") -> Iterator[Finding]:
        imported = _FRAMEWORKS & sys.modules.keys() - self._frameworks
        started = set(threading.enumerate()) - self._threads
        self._frameworks |= imported
        self._threads |= started
        if imported:
            yield Finding(f"{what} imports {' and '.join(sorted(imported))}", hint, about)
        if started:
            names = " and ".join(sorted(thread.name for thread in started))
            yield Finding(f"{what} starts a thread ({names})", hint, about)


def inspect_plugin(point: importlib.metadata.EntryPoint) -> Inspection:
    """Discover the plugin of an entry point, import its classes and probe its backends; once in a process."""
    watch = _Watch()
    plugins = Plugins.discover([point])
    findings = [Finding(problem.cause, problem.hint) for problem in plugins.problems if problem.kind is None]
    late = f"every fdcore command discovers plugins: in {point.module}, import it inside the functions that need it"
    findings += watch.since("discovering it", late)
    own = [origin for origin in plugins.origins if origin.distribution != "fd-core"]
    offers = [offer for origin in own for offer in plugins.offers(origin)]
    if not offers and not findings:
        findings.append(Finding("it registers nothing", "implement one of the hooks in fd_core/hookspecs.py"))
    answers: list[str] = []
    for offer in offers:
        findings += _inspect_offer(offer, watch, answers)
    return Inspection(
        offers=tuple(offer.label for offer in offers),
        names=tuple(offer.name for offer in offers),
        answers=tuple(answers),
        findings=tuple(findings),
    )


def _inspect_offer(offer: PluginOffer, watch: _Watch, answers: list[str]) -> Iterator[Finding]:
    about = offer.label
    if len(offer.entry.summary.splitlines()) != 1 or not offer.entry.summary.strip():
        cause = "its summary, shown by `fdcore plugins`, is not one line"
        yield Finding(cause, f"describe {offer.name} in the Entry, in one line", about)
    try:
        cls = offer.load()
        if offer.kind is POSTPROCESS and not (cls.serves and isinstance(cls.serves, tuple)):
            hint = 'set serves = ("torch",), or other frameworks or backends, in the class'
            yield Finding(f"{offer.entry.target} does not set `serves`", hint, about)
        if offer.kind is not BACKEND:
            return
        late = (
            "`--backend auto` and `fdcore env` probe every backend: import it in make_ops, and detect it in probe "
            "with importlib.util.find_spec or in a separate process"
        )
        yield from watch.since(f"importing {offer.entry.target}", late, about)
        if getattr(cls, "name", None) != offer.name:
            cause = f"{offer.entry.target} has the name {getattr(cls, 'name', None)!r}"
            yield Finding(cause, f"set name = {offer.name!r} in the class, or correct the name of the Entry", about)
        availability = offer.probe()
        yield from watch.since(f"{offer.entry.target}.probe", late, about)
        if not availability.reason.strip():
            yield Finding("its probe gives no reason", "return a reason of one line that users understand", about)
        answers.append(f"{about} {'can' if availability.available else 'cannot'} run here: {availability.reason}")
    except PluginError as error:
        yield Finding(str(error.__cause__), error.hint or "", about)


_TIMEOUT: Final = 60
"""Timeout for the import and the probes of a plugin, in seconds."""


class Checked(msgspec.Struct, frozen=True):
    """A plugin and the result of its inspection."""

    distribution: str
    version: str
    entry_point: str
    """As in the metadata, `name = module`; empty if there is none."""
    seen: Inspection

    def called(self, name: str) -> bool:
        """Return True if `name` may refer to it: the entry point, the distribution or one of its names."""
        return name in (self.entry_point.split(" ")[0], *self.seen.names) or _same(name, self.distribution)

    def paragraphs(self) -> list[str]:
        """Return a paragraph for each problem: location, cause and remedy."""
        where = f"{self.distribution} {self.version}"
        if self.entry_point:
            where += f", entry point {self.entry_point}"
        return [
            f"{where}{', ' if finding.about else ''}{finding.about}: {finding.cause}. Remedy: {finding.hint}."
            for finding in self.seen.findings
        ]


def check_plugins(name: str | None = None) -> list[Checked]:
    """Inspect installed plugins, all or those called `name`; `PluginError` for none, `ConfigError` for the core."""
    points = sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=str)
    checked = list(_with_contested_names([_checked(point) for point in points]))
    if name is None:
        return checked
    return [each for each in checked if each.called(name)] or [_without_entry_point(name, checked)]


def _checked(point: EntryPoint) -> Checked:
    name, version = (point.dist.name, point.dist.version) if point.dist else ("unknown distribution", "?")
    return Checked(name, version, f"{point.name} = {point.value}", seen=_inspect_isolated(name, point.name))


def _inspect_isolated(distribution: str, entry_point: str) -> Inspection:
    command = [sys.executable, "-P", "-m", "fd_core.cli.plugins.plugin_check", distribution, entry_point]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    hint = "its code does this during import or probe: install another version of it, or ask its author"
    try:
        ended = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return Inspection(findings=(Finding(f"it did not respond within {_TIMEOUT} seconds", hint),))
    try:
        return msgspec.json.decode(ended.stdout, type=Inspection)
    except msgspec.DecodeError:
        words = ended.stderr.decode(errors="replace").split()
        last_output = f", with the last output: {' '.join(words[-30:])}" if words else ""
        return Inspection(
            findings=(Finding(f"it ended the process with exit code {ended.returncode}{last_output}", hint),)
        )


def _with_contested_names(checked: Sequence[Checked]) -> Iterator[Checked]:
    """Add to each plugin the problems with names that others offer as well."""
    core = Plugins.discover([])
    givers: dict[str, list[str]] = {}
    for origin in core.origins:
        for offer in core.offers(origin):
            givers.setdefault(offer.label, []).append(origin.distribution)
    for each in checked:
        for label in each.seen.offers:
            givers.setdefault(label, []).append(each.distribution)
    hint = "a name that two plugins offer is disabled: uninstall one of them, or rename your own"
    contested = {
        label: Finding(f"the name is offered by {' and '.join(names)}", hint, label)
        for label, names in givers.items()
        if len(names) > 1
    }
    for each in checked:
        more = [contested[label] for label in each.seen.offers if label in contested]
        yield replace(each, seen=replace(each.seen, findings=(*each.seen.findings, *more)))


def _without_entry_point(name: str, checked: Sequence[Checked]) -> Checked:
    """Explain why no plugin is called `name`: its distribution may be installed without an entry point."""
    for guess in (name, f"fd-{name}"):
        try:
            version = importlib.metadata.version(guess)
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
        if _same(guess, "fd-core"):
            break
        group = f"project.entry-points.{ENTRY_POINT_GROUP}"
        cause = f"it is installed but has no entry point in group {ENTRY_POINT_GROUP}, so it is not a plugin"
        hint = f"to make it one, add its module under [{group}] in its pyproject.toml and reinstall it"
        return Checked(guess, version, "", seen=Inspection(findings=(Finding(cause, hint),)))
    core = Plugins.discover([])
    if any(offer.name == name for origin in core.origins for offer in core.offers(origin)):
        raise ConfigError(f"{name} is part of fd_core; this command checks installed plugins", field="NAME")
    there = ", ".join(each.distribution for each in checked) or "none"
    raise PluginError(f"plugin {name!r} is not installed", field="NAME", hint=f"installed: {there}")


def _same(name: str, other: str) -> bool:
    return re.sub(r"[-_.]+", "-", name).lower() == re.sub(r"[-_.]+", "-", other).lower()


def _main(distribution: str, entry_point: str) -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # output of the plugin must not mix with the result
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=entry_point):
        if point.dist is not None and point.dist.name == distribution:
            with os.fdopen(answer, "wb") as file:
                file.write(msgspec.json.encode(inspect_plugin(point)))
            return
    sys.exit(f"{distribution} has no entry point {entry_point}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
