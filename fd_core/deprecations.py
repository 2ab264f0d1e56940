"""Deprecated names: each works for a stated number of versions, and warns once with the name of its replacement.

`docs/extend/public-names.md` has the promise; a test ensures that no name outlives its last version.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

__all__ = [
    "KEPT_MINOR_VERSIONS",
    "OLD_NAMES",
    "OldName",
    "OldNameWarning",
    "accept_old_names",
    "old_attributes",
    "replaced",
    "warn_once",
]

KEPT_MINOR_VERSIONS: Final = 2
"""An old name works at least in this many minor versions after the one that replaced it."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C")
_warned: set[str] = set()


class OldNameWarning(FutureWarning):
    """A name is used that a later version will not have. Python shows it to all users unless it is filtered."""


@dataclass(frozen=True, slots=True)
class OldName:
    """A setting, variable, flag or function that has another name."""

    name: str
    """The old name as users write it: `FD_OLD`, `--old`, `package.function`."""
    instead: str
    """The replacement."""
    since: str
    """The minor version that replaced it, such as `0.1`."""
    until: str
    """The first minor version without it, more than `KEPT_MINOR_VERSIONS` later."""

    def __str__(self) -> str:
        return f"{self.name} was replaced in fd_core {self.since} and is not read from {self.until} on: {self.instead}"


_RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "fd_core.backends.contract.Backend": {"places": "device_assignments", "dtype_asked_for": "requested_dtype"},
    "fd_core.backends.places": {
        "EnginePlace": "fd_core.backends.device_assignment.DeviceAssignment",
        "places_on_cores": "fd_core.backends.device_assignment.assignments_on_cores",
        "places_on_devices": "fd_core.backends.device_assignment.assignments_on_devices",
    },
    "fd_core.config.ListenConfig": {"asks_for_keys": "requires_keys"},
    "fd_core.kv.stores.contract": {"Trouble": "fd_core.kv.stores.contract.FailureReason"},
    "fd_core.kv.stores.contract.StoreError": {"trouble": "reason"},
    "fd_core.ops.contract.Ops": {"expands_weights": "dequantizes_weights"},
    "fd_core.ops.contract.StepInput": {"lora_places": "lora_slots"},
    "fd_core.scheduling.policies.SchedulingPolicy": {"expendable": "preemption_candidates"},
    "fd_core.scheduling.requests.Request": {
        "abort_wanted": "abort_requested",
        "asked_store": "lookup_issued",
        "waits_as": "queued_view",
    },
    "fd_core.testing.models.cases": {"KitCase": "fd_core.testing.models.cases.SuiteCase"},
    "fd_core.text.parsing.reader.TextReader": {
        "say_arguments": "emit_arguments",
        "say_content": "emit_content",
        "say_read": "emit_read",
        "say_reasoning": "emit_reasoning",
    },
}
"""New names by owner, a class or a module, and old name."""


def _old_names(owner: str) -> dict[str, OldName]:
    names = _RENAMED[owner].items()
    return {old: OldName(f"{owner}.{old}", f"use {new}", since="0.2", until="0.5") for old, new in names}


_OLD_METRICS: Final = {
    "fdcore_kv_store_failures{trouble}": "query the label reason",
    "fdcore_router_worker_tells_kv": "query fdcore_router_worker_reports_kv",
    "fdcore_take_backs_in_flight": "query fdcore_slots_draining",
}
"""Published alongside their replacements, without a warning."""

OLD_NAMES: Final[tuple[OldName, ...]] = (
    *(old for owner in _RENAMED for old in _old_names(owner).values()),
    *(OldName(name, instead, since="0.2", until="0.5") for name, instead in _OLD_METRICS.items()),
)
"""All old names that still work."""


def warn_once(old: OldName, *, stacklevel: int = 1) -> None:
    """Warn with `OldNameWarning`, once in a process for each name; `stacklevel` 1 blames the caller."""
    if old.name not in _warned:
        _warned.add(old.name)
        warnings.warn(str(old), OldNameWarning, stacklevel=stacklevel + 1)


def replaced(old: OldName) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a public function that has a successor: it works as before and warns on its first call."""

    def wrap(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def warned(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            warn_once(old, stacklevel=2)
            return function(*args, **kwargs)

        return warned

    return wrap


class _Alias:
    """Class attribute that reads another one and warns."""

    def __init__(self, old: OldName, new: str) -> None:
        self._old = old
        self._new = new

    def __get__(self, instance: object | None, owner: type[Any]) -> Any:
        warn_once(self._old, stacklevel=2)
        return getattr(owner if instance is None else instance, self._new)


def accept_old_names(owner: type[_C]) -> type[_C]:
    """Decorate a class with renamed attributes: the old ones work as well, also where a subclass overrides them."""
    name = f"{owner.__module__}.{owner.__qualname__}"
    renamed, old_names = _RENAMED[name], _old_names(name)
    inherited = owner.__init_subclass__

    def init_subclass(cls: type[Any], /, **kwargs: Any) -> None:
        for old, new in renamed.items():
            if old in vars(cls):
                warn_once(old_names[old], stacklevel=2)
                setattr(cls, new, vars(cls)[old])
                delattr(cls, old)
        inherited.__func__(cls, **kwargs) if hasattr(inherited, "__func__") else inherited(**kwargs)

    for old, new in renamed.items():
        setattr(owner, old, _Alias(old_names[old], new))
    owner.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
    return owner


def old_attributes(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module with renamed attributes."""

    def get(name: str) -> Any:
        if name not in _RENAMED[module]:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_once(_old_names(module)[name], stacklevel=2)
        target, _, attribute = _RENAMED[module][name].rpartition(".")
        return getattr(importlib.import_module(target), attribute)

    return get
