"""What one plugin does when it is discovered and asked: run as a process of its own.

Alone in its process, what it imports is its own doing and not that of a plugin before it; and one that ends the process
or never answers harms nobody. `python -m fd_core.cli.plugins.plugin_inspection DISTRIBUTION ENTRY_POINT` writes an
`Inspection` as JSON to its standard output.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from typing import Final

import msgspec

from fd_core.errors import PluginError
from fd_core.hookspecs import ENTRY_POINT_GROUP
from fd_core.plugins import BACKEND, POSTPROCESS, PluginOffer, Plugins

_FRAMEWORKS: Final = frozenset(
    (
        *("cupy", "flashinfer", "jax", "numba", "onnx", "onnxruntime", "paddle", "tensorflow", "torch", "transformers"),
        *("triton", "vllm"),
    )
)


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    cause: str
    hint: str
    """What to do about it."""
    about: str = ""
    """Kind and name of the one thing that is concerned, such as `backend mychip`; empty for the whole plugin."""


class Inspection(msgspec.Struct, frozen=True):
    """What was seen of one plugin."""

    offers: tuple[str, ...] = ()
    """Kinds and names, such as `backend mychip`."""
    names: tuple[str, ...] = ()
    """The same without their kinds."""
    answers: tuple[str, ...] = ()
    """What each backend says about running here."""
    findings: tuple[Finding, ...] = ()


class _Watch:
    """Sees frameworks that are imported and threads that are started; each is told once."""

    def __init__(self) -> None:
        self._frameworks, self._threads = _frameworks(), set(threading.enumerate())

    def since(self, what: str, hint: str, about: str = "") -> Iterator[Finding]:
        """Yield what happened since the last call."""
        imported, started = _frameworks() - self._frameworks, set(threading.enumerate()) - self._threads
        self._frameworks |= imported
        self._threads |= started
        if imported:
            yield Finding(f"{what} imports {' and '.join(sorted(imported))}", hint, about)
        if started:
            names = " and ".join(sorted(thread.name for thread in started))
            yield Finding(f"{what} starts a thread ({names})", hint, about)


def inspect_plugin(point: importlib.metadata.EntryPoint) -> Inspection:
    """Discover the plugin behind an entry point, import what it offers and ask its backends; once in a process."""
    watch = _Watch()
    plugins = Plugins.discover([point])
    findings = [Finding(problem.cause, problem.hint) for problem in plugins.problems if problem.kind is None]
    late = f"every fdcore command discovers plugins: let {point.module} import it inside the functions that need it"
    findings += watch.since("discovering it", late)
    own = [origin for origin in plugins.origins if origin.distribution != "fd-core"]
    offers = [offer for origin in own for offer in plugins.offers(origin)]
    if not offers and not findings:
        findings.append(Finding("it offers nothing", "implement one of the hooks in fd_core/hookspecs.py"))
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
        cause = "its summary, which `fdcore plugins` shows, is not one line"
        yield Finding(cause, f"say in the Entry what {offer.name} is, in one line", about)
    try:
        cls = offer.load()
        if inspect.isabstract(cls):
            missing = " and ".join(sorted(cls.__abstractmethods__))
            yield Finding(f"{offer.entry.target} leaves {missing} open", f"implement {missing}", about)
        if offer.kind is POSTPROCESS and not (cls.serves and isinstance(cls.serves, tuple)):
            hint = 'write serves = ("torch",) or other names of frameworks or backends in the class'
            yield Finding(f"{offer.entry.target} does not say what it serves", hint, about)
        if offer.kind is not BACKEND:
            return
        late = (
            "`--backend auto` and `fdcore env` ask every backend: import it in make_ops, and look for it in probe with "
            "importlib.util.find_spec or in a process of its own"
        )
        yield from watch.since(f"importing {offer.entry.target}", late, about)
        if getattr(cls, "name", None) != offer.name:
            cause = f"{offer.entry.target} calls itself {getattr(cls, 'name', None)!r}"
            yield Finding(cause, f"write name = {offer.name!r} in the class, or correct the name of the Entry", about)
        availability = offer.probe()
        yield from watch.since(f"{offer.entry.target}.probe", late, about)
        if not availability.reason.strip():
            yield Finding("its probe gives no reason", "give users one line that they understand", about)
        answers.append(f"{about} {'can' if availability.available else 'cannot'} run here: {availability.reason}")
    except PluginError as error:
        yield Finding(str(error.__cause__), error.hint or "", about)


def _frameworks() -> set[str]:
    return {name for name in _FRAMEWORKS if name in sys.modules}


def _main(distribution: str, entry_point: str) -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # what the plugin prints must not mix with the answer
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=entry_point):
        if point.dist is not None and point.dist.name == distribution:
            with os.fdopen(answer, "wb") as file:
                file.write(msgspec.json.encode(inspect_plugin(point)))
            return
    sys.exit(f"{distribution} has no entry point {entry_point}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
