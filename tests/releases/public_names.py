"""The public names of fd_core, one a line; `python -m tests.releases.public_names` records them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fd_core
from fd_core import hookspecs
from fd_core.cli.settings.flags import (
    API_KEY_FILE,
    CONFIG_FILE,
    ENGINE_FLAGS,
    GATEWAY_FLAGS,
    ROUTER_FLAGS,
    SERVER_FLAGS,
)
from tests.reference import page

RECORD = Path(__file__).with_name("public_names.txt")
PAGE = Path(__file__).parents[2] / "docs" / "extend" / "public-names.md"
FLAGS = (*ENGINE_FLAGS, *SERVER_FLAGS, *GATEWAY_FLAGS, *ROUTER_FLAGS, API_KEY_FILE, CONFIG_FILE)
OTHER_VARIABLES = ("FD_CACHE", "FD_ISA", "FD_MODEL", "FD_LOG_LEVEL")


def modules() -> list[str]:
    """Return the modules that the page of public names lists."""
    listed = re.search(r"<!-- modules -->\n(.*)<!-- end of modules -->", PAGE.read_text(), re.DOTALL)
    assert listed
    return re.findall(r"^- `([\w.]+)`$", listed[1], re.MULTILINE)


def names() -> list[str]:
    """Return every public name, sorted."""
    found = {*_python(), *_command_line(), *_written("metrics.md", "metric", r"^\| `(\w+)` \| (\w+) \|")}
    found |= {*_written("http.md", "http", r"^\| ([A-Z]+) \| `([^`]+)` \|"), *_fields()}
    return sorted(found)


def _python() -> Iterator[str]:
    for module in ("fd_core", *modules()):
        home = importlib.import_module(module)
        offered = [*home.__all__, *(name for name in vars(hookspecs) if name.startswith("fd_") and home is hookspecs)]
        for name in offered:
            yield from _named(f"python {module}.{name}", getattr(home, name))


def _named(where: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield where + (_parameters(value) if inspect.isroutine(value) else "")
        return
    yield where
    mine = {name: each for base in reversed(value.__mro__) if _ours(base) for name, each in vars(base).items()}
    fields = {name for base in value.__mro__ if _ours(base) for name in inspect.get_annotations(base)}
    for name in {*mine, *fields}:
        each = mine.get(name)
        if not name.startswith("_"):
            plain = getattr(each, "__func__", each)
            yield f"{where}.{name}" + (_parameters(plain) if inspect.isfunction(plain) else "")


def _ours(base: type) -> bool:
    return base.__module__.startswith("fd_core")


def _parameters(function: Any) -> str:
    shown = []
    kinds = inspect.Parameter
    for each in inspect.signature(function).parameters.values():
        star = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(each.kind, "")
        if each.kind is kinds.KEYWORD_ONLY and not any(word.startswith("*") for word in shown):
            shown.append("*")
        shown.append(f"{star}{each.name}" + ("=" if each.default is not kinds.empty else ""))
    return f"({', '.join(shown)})"


def _command_line() -> Iterator[str]:
    for flag in FLAGS:
        yield f"flag {flag.flag}"
        yield f"variable {flag.variable}"
    yield from (f"variable {name}" for name in OTHER_VARIABLES)
    yield from _written("commands.md", "command", r"^## (fdcore [\w -]+)$")


def _written(name: str, kind: str, pattern: str) -> Iterator[str]:
    """Yield the names on a page that is generated from the code."""
    for words in re.findall(pattern, page(name), re.MULTILINE):
        yield f"{kind} {words if isinstance(words, str) else ' '.join(words)}"


def _fields() -> Iterator[str]:
    for section in page("http.md").split("\n## ")[1:]:
        fields = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        yield from (
            f"field {path}: {name}" for path in re.findall("`([^`]+)`", section.splitlines()[0]) for name in fields
        )


if __name__ == "__main__":
    RECORD.write_text("\n".join(names()) + "\n", encoding="utf-8")
    print(f"{len(names())} public names of fd_core {fd_core.__version__}")
