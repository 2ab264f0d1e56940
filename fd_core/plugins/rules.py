"""The rules that code and data of a plugin must keep; whoever breaks one learns the cause and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from fd_core import hookspecs
from fd_core.hookspecs import CONTRACT_VERSION, ENTRY_POINT_GROUP, Entry

OWN_CODE: Final = "the plugin's own code raised this: install another version of it or ask its maker"
"""What to do about an error that only its maker can explain."""
_HOOK_PREFIX: Final = "fd_"
_NAME: Final = re.compile(r"[a-z0-9_+]+")
_TARGET: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class StrangerError(Exception):
    """Code or data of a plugin broke a rule; the text is the cause, `hint` says what to do."""

    def __init__(self, cause: str, hint: str) -> None:
        super().__init__(cause)
        self.hint = hint


def shielded(action: Callable[[], Any]) -> Any:
    """Run code of a plugin. Whatever it raises becomes a `StrangerError`, the plugin's problem."""
    try:
        return action()
    except StrangerError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise StrangerError(f"{type(error).__name__}: {text}".removesuffix(": "), _hint_for(error)) from error


def _hint_for(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install what provides {error.name}; if the plugin needs it, its pyproject.toml has to say so"
    if isinstance(error, (ImportError, AttributeError)):
        return "correct the name, or install the version that has it"
    return OWN_CODE


def check_module(module: object) -> None:
    """Refuse a plugin that was built for another contract or implements an unknown hook; `StrangerError`."""
    if not isinstance(module, ModuleType):
        hint = f"in pyproject.toml, [project.entry-points.{ENTRY_POINT_GROUP}], write the module without `:`"
        raise StrangerError(f"the entry point names {described(module)}; it must name a module", hint)
    version = getattr(module, "FD_CONTRACT", None)
    if version is None:
        cause = f"{module.__name__} declares no FD_CONTRACT; this fd_core implements {CONTRACT_VERSION}"
        raise StrangerError(cause, f"write FD_CONTRACT = {CONTRACT_VERSION} there once it keeps that contract")
    if type(version) is not int or version != CONTRACT_VERSION:
        cause = f"it was built for contract {version!r}; this fd_core implements {CONTRACT_VERSION}"
        raise StrangerError(cause, "install the version of the plugin, or of fd-core, that matches the other")
    known = {name for name in vars(hookspecs) if name.startswith(_HOOK_PREFIX)}
    for name, value in vars(module).items():
        if not callable(value):
            continue
        marker = getattr(value, "fd_core_impl", None)
        if marker is None and not name.startswith(_HOOK_PREFIX):
            continue
        hook = (marker or {}).get("specname") or name
        if hook not in known:
            hint = "correct the spelling; a newer hook needs a newer fd-core; helpers must not begin with fd_"
            raise StrangerError(f"{hook} is not a hook; there are {', '.join(sorted(known))}", hint)
        if marker is None:
            raise StrangerError(f"{name} is not marked with fd_core.hookspecs.hookimpl", "put @hookimpl above it")


def checked_entries(hook: str, answer: object) -> list[Entry]:
    """Return what a hook answered if it is a sequence of sound entries. Raises `StrangerError`."""
    hint = f"let {hook} return a list of Entry(name, 'package.module:Class', 'one line for lists')"
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise StrangerError(f"{hook} returned {described(answer)} instead of a sequence of Entry", hint)
    entries: list[Entry] = []
    for item in answer:
        if not isinstance(item, Entry):
            raise StrangerError(f"{hook} returned a sequence with {described(item)} instead of an Entry", hint)
        if not isinstance(item.name, str) or not _NAME.fullmatch(item.name):
            raise StrangerError(f"{hook}: name {item.name!r} may have lower case, digits, _ and + only", hint)
        if not isinstance(item.target, str) or not _TARGET.fullmatch(item.target):
            raise StrangerError(f"{hook}: target {item.target!r} of {item.name} is not package.module:Class", hint)
        if not isinstance(item.summary, str):
            cause = f"{hook}: summary of {item.name} is {described(item.summary)} instead of a line"
            raise StrangerError(cause, hint)
        entries.append(item)
    return entries


def described(value: object) -> str:
    """Return type and value in a few words."""
    return f"{type(value).__name__} {value!r:.60}"
