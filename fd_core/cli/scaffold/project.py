"""Writes the project of a backend from the templates.

A template is a file of the project with `$name` and the other words of `_words` in it, as in `string.Template`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import keyword
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Final

import fd_core
from fd_core.cli.scaffold import Framework
from fd_core.errors import ConfigError
from fd_core.hookspecs import CONTRACT_VERSION, ENTRY_POINT_GROUP
from fd_core.plugins import BACKEND, KNOWN_PLUGINS, Plugins

__all__ = ["write_project"]


_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
_LONGEST_NAME: Final = 40
_RESERVED: Final = ("auto",)

_FILES: Final[Mapping[str, str]] = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    ".gitignore": "gitignore",
    "$package/__init__.py": "plugin.py",
    "$package/backend.py": "${framework}_backend.py",
    "$package/ops.py": "${framework}_ops.py",
    "$package/py.typed": "",
    "tests/test_conformance.py": "test_conformance.py",
}
"""Files of a project to their templates; "" leaves a file empty."""

_TITLES: Final[Mapping[Framework, str]] = {
    Framework.TORCH: "torch",
    Framework.PADDLE: "Paddle",
    Framework.ONNX: "ONNX Runtime",
    Framework.NUMPY: "numpy",
}


def write_project(name: str, framework: Framework, folder: Path | None = None) -> Path:
    """Write a project for the backend `name` and return its folder, by default `fd-NAME` in the working folder.

    Raises `ConfigError` if the name cannot be used, a file of the project is there already, or it cannot be written.
    """
    _check_name(name)
    words = _words(name, framework)
    folder = folder or Path(words["distribution"])
    files = {
        folder / Template(file).substitute(words): _text(Template(template).substitute(words), words)
        for file, template in _FILES.items()
    }
    there = [str(path) for path in files if path.exists() or path.is_symlink()]
    if there:
        raise ConfigError(f"{there[0]} is there already, and nothing is overwritten", field="--into")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}", field="--into") from error
    return folder


def _check_name(name: str) -> None:
    """Raise `ConfigError` for a name that cannot be a backend, a package and a distribution, or that is taken."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"{name!r} cannot be the name of a backend",
            field="NAME",
            hint=f"lower case letters and digits, in words joined by _, up to {_LONGEST_NAME}, such as mychip",
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in _RESERVED:
        raise ConfigError(f"{name!r} is a reserved word", field="NAME", hint="take another, such as mychip")
    core = Plugins.discover([])
    if name in core.offered(BACKEND):
        raise ConfigError(f"{name} is a backend of fd_core itself", field="NAME", hint="take another name")
    if name in KNOWN_PLUGINS:
        raise ConfigError(f"{name} is the project's own plugin {KNOWN_PLUGINS[name]}", field="NAME")
    package = f"fd_{name}"
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        giver = point.dist.name if point.dist else "an installed plugin"
        raise ConfigError(f"the name {name} is taken by {giver}", field="NAME", hint="take another name")
    if importlib.util.find_spec(package) is not None:
        raise ConfigError(f"the package {package} exists already", field="NAME", hint="take another name")


def _words(name: str, framework: Framework) -> dict[str, str]:
    """Return what the templates call by name."""
    camel = "".join(word.capitalize() for word in name.split("_"))
    extra = "" if framework is Framework.NUMPY else f"[{framework}]"
    return {
        "name": name,
        "distribution": f"fd-{name.replace('_', '-')}",
        "package": f"fd_{name}",
        "backend": f"{camel}Backend",
        "ops": f"{camel}Ops",
        "framework": framework.value,
        "title": _TITLES[framework],
        "requirement": f"fd-core{extra}>={'.'.join(fd_core.__version__.split('.')[:2])}",
        "contract": str(CONTRACT_VERSION),
    }


def _text(template: str, words: Mapping[str, str]) -> str:
    if not template:
        return ""
    source = resources.files(__package__).joinpath(f"{template}.tmpl").read_text(encoding="utf-8")
    return Template(source).substitute(words)
