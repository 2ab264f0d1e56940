"""Requirements of the kit, and of a suite on the code under test, with the reason for an unmet one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any, Final, NoReturn, TypeVar

from fd_core.config.envelope import OperatingEnvelope
from fd_core.errors import FdError, PluginError
from fd_core.plugins import Kind, described

_Plugin = TypeVar("_Plugin")

EXTRA: Final = "fd-core[conformance]"
FAMILIES_EXTRA: Final = "fd-core[families]"
PACKAGES: Final = ("pytest", "hypothesis")
"""Imports of the kit that are not dependencies of the core."""


def require_packages(*more: str, extra: str = EXTRA) -> None:
    """Raise `PluginError`, with the name of the extra, if a package of the kit, or one of `more`, is missing."""
    for package in (*PACKAGES, *more):
        if find_spec(package) is None:
            raise PluginError(f"the conformance kit needs {package}", hint=f"pip install '{extra}'")


def constructed(
    kind: Kind[_Plugin], which: str | type, make: Callable[[], Any], passes: type[FdError] = PluginError
) -> _Plugin:
    """Return the plugin that `make` constructs. Raises `PluginError` if that fails, or for an object of another kind.

    Errors of the type `passes` remain as they are. Fails if settings of the process change, which may happen once.
    """
    from fd_core.testing.hooks.purity import unchanged_process

    what = f"{kind.word} {which if isinstance(which, str) else f'{which.__module__}:{which.__qualname__}'}"
    with unchanged_process(holds=True):
        try:
            made = make()
        except passes:
            raise
        except (Exception, SystemExit) as error:
            text = " ".join(str(error).split())
            raise PluginError(f"{what} cannot be used: {type(error).__name__}: {text}") from error
    if not isinstance(made, resolve_name(kind.base)):
        raise PluginError(f"{what} cannot be used: its class constructs {described(made)}")
    return made


class ReadNames(dict[str, Any]):
    """Settings, and the names of those that a plugin has read or asked for one by one."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read = set[str]()

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


@dataclass(frozen=True, slots=True)
class Requirement:
    """An ability that tests require: present, or absent for a reason."""

    reason: str | None = None
    """Reason for the absence; None if the ability is present."""

    def require(self) -> None:
        """Skip the running test, with the reason, if the ability is absent."""
        if self.reason is not None:
            lacks(self.reason)


OPEN = Requirement()


def closed(reason: str) -> Requirement:
    """Return a requirement that is not met; `reason` completes "not tested: ..."."""
    return Requirement(reason)


def lacks(reason: str) -> NoReturn:
    """Skip the running test; `reason` completes "not tested: ..."."""
    import pytest

    raise pytest.skip.Exception(f"not tested: {reason}")


class _DeclaredEnvelope:
    """Envelope of the plugin that the running tests test."""

    envelope = OperatingEnvelope()


def declare_envelope(envelope: OperatingEnvelope) -> None:
    """Skip tests beyond an envelope from now on; see `require_sizes`."""
    _DeclaredEnvelope.envelope = envelope


def require_sizes(sizes: Mapping[str, int]) -> None:
    """Skip the running test if the plugin under test declares a smaller limit; cases test up to the edge instead."""
    for name, limit in _DeclaredEnvelope.envelope.exceeded(sizes).items():
        lacks(f"its envelope has {name}={limit}; the test has {sizes[name]}")


def thorough_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return parameters of a test, all but the `quick` ones marked for `-m "not fd_thorough"`."""
    import pytest

    return [value if value in quick else pytest.param(value, marks=pytest.mark.fd_thorough) for value in values]
