"""Writes the project of a plugin from the templates.

A template is a file of the project with `$name` and the other words of `_words` in it, as in `string.Template`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import keyword
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Final

import fd_core
from fd_core.cli.plugins.scaffold import Framework, PluginKind
from fd_core.cli.plugins.scaffold.recipes import RECIPES, TITLES, ScaffoldRecipe
from fd_core.errors import ConfigError
from fd_core.hookspecs import CONTRACT_VERSION, ENTRY_POINT_GROUP
from fd_core.plugins import KNOWN_PLUGINS, Plugins

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
_LONGEST_NAME: Final = 40

_FILES: Final[Mapping[str, str]] = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    ".gitignore": "gitignore",
    "$package/__init__.py": "plugin.py",
    "$package/py.typed": "",
    "tests/test_conformance.py": "tests/test_$kind.py",
}
"""Files of every project to their templates; "" leaves a file empty."""


@dataclass(frozen=True, slots=True)
class NewProject:
    """A project that was written."""

    folder: Path
    next: tuple[str, ...]
    """The commands that lead on, for a shell in the working folder."""


def write_project(
    name: str, kind: PluginKind, framework: Framework | None = None, folder: Path | None = None
) -> NewProject:
    """Write a project for the plugin `name`, by default into a new folder of that name in the working folder.

    `framework` is for backends, numpy by default. A folder that is named may be there already, but none of the
    project's files. Raises `ConfigError` if the name cannot be used, something is there already, or it cannot be
    written.
    """
    recipe = RECIPES[kind]
    if framework is not None and kind is not PluginKind.BACKEND:
        raise ConfigError(f"a {recipe.kind.word} begins with no framework", field="--framework", hint="leave it out")
    _check_name(name, recipe)
    words = _words(name, kind, framework or Framework.NUMPY)
    if folder is None:
        folder = Path(name)
        if folder.exists() or folder.is_symlink():
            hint = "take another name, or name the folder with --into: nothing there is overwritten"
            raise ConfigError(f"{folder} is there already", field="NAME", hint=hint)
    own = {f"$package/{file}": template for file, (template, _) in recipe.files.items()}
    templates = resources.files(__package__).joinpath("templates")
    files = {}
    for file, template in {**_FILES, **own}.items():
        source = templates.joinpath(f"{_filled(template, words)}.tmpl").read_text(encoding="utf-8") if template else ""
        files[folder / _filled(file, words)] = _filled(source, words)
    there = [str(path) for path in files if path.exists() or path.is_symlink()]
    if there:
        raise ConfigError(f"{there[0]} is there already, and nothing is overwritten", field="--into")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as new:
                new.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}", field="--into") from error
    commands = (f"cd {shlex.quote(str(folder))}", "pip install -e '.[test]'", f"fdcore plugins check {name}")
    return NewProject(folder, (*commands, words["prove"].partition(" #")[0].rstrip()))


def _check_name(name: str, recipe: ScaffoldRecipe) -> None:
    """Raise `ConfigError` for a name that cannot be a plugin, a package and a distribution, or that is taken."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        hint = f"lower case letters and digits, in words joined by _, up to {_LONGEST_NAME}, such as mychip"
        raise ConfigError(f"{name!r} cannot be the name of a {recipe.kind.word}", field="NAME", hint=hint)
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name == "auto":
        raise ConfigError(f"{name!r} is a reserved word", field="NAME", hint="take another, such as mychip")
    if name in Plugins.discover([]).offered(recipe.kind):
        raise ConfigError(f"{name} is a {recipe.kind.word} of fd_core itself", field="NAME", hint="take another name")
    if name in KNOWN_PLUGINS:
        raise ConfigError(f"{name} is the project's own plugin {KNOWN_PLUGINS[name]}", field="NAME")
    package = f"fd_{name}"
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        giver = point.dist.name if point.dist else "an installed plugin"
        raise ConfigError(f"the name {name} is taken by {giver}", field="NAME", hint="take another name")
    if importlib.util.find_spec(package) is not None:
        raise ConfigError(f"the package {package} exists already", field="NAME", hint="take another name")


def _words(name: str, kind: PluginKind, framework: Framework) -> dict[str, str]:
    """Return what the templates call by name."""
    recipe = RECIPES[kind]
    camel = "".join(word.capitalize() for word in name.split("_"))
    extra = f"[{framework}]" if kind is PluginKind.BACKEND and framework is not Framework.NUMPY else ""
    words = {
        "name": name,
        "distribution": f"fd-{name.replace('_', '-')}",
        "package": f"fd_{name}",
        "kind": kind.replace("-", "_"),
        "module": recipe.module,
        "cls": f"{camel}{recipe.suffix}",
        "ops": f"{camel}Ops",
        "hook": recipe.kind.hook,
        "flag": recipe.kind.flag,
        "what": recipe.what,
        "guide": recipe.guide,
        "framework": framework.value,
        "title": TITLES[framework],
        "requirement": f"fd-core{extra}>={'.'.join(fd_core.__version__.split('.')[:2])}",
        "contract": str(CONTRACT_VERSION),
    }
    files = "\n".join(f"| `$package/{file}` | {purpose} |" for file, (_, purpose) in recipe.files.items())
    texts = {"summary": recipe.summary, "about": recipe.about, "prove": recipe.prove, "use": recipe.use, "files": files}
    return words | {word: _filled(text, words) for word, text in texts.items()}


def _filled(text: str, words: Mapping[str, str]) -> str:
    return Template(text).substitute(words)
