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
from types import MappingProxyType
from typing import Any, Final

import fd_core
from fd_core import plugins
from fd_core.cli.plugins.scaffold import Framework, PluginKind
from fd_core.errors import ConfigError
from fd_core.hookspecs import CONTRACT_VERSION, ENTRY_POINT_GROUP

TITLES: Final[Mapping[Framework, str]] = {
    Framework.TORCH: "torch",
    Framework.PADDLE: "Paddle",
    Framework.ONNX: "ONNX Runtime",
    Framework.NUMPY: "numpy",
}
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
_LONGEST_NAME: Final = 40

_FILES: Final[Mapping[str, str]] = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    ".gitignore": "gitignore",
    "$package/__init__.py": "plugin.py",
    "$package/py.typed": "",
    "tests/test_conformance.py": "tests/test_$test.py",
}
"""Files of every project to their templates; "" leaves a file empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaffoldRecipe:
    """One kind of project. Texts may contain the words of templates, such as `$name`."""

    kind: plugins.Kind[Any]
    suffix: str
    """Suffix of the class name, after the name."""
    files: Mapping[str, tuple[str, str]]
    """Templates and purposes of the files in the package; the first has the class."""
    summary: str
    about: str = ""
    """Continuation of the README's first sentence."""
    prove: str = "pytest   # verifies the contract"
    use: str = "fdcore serve smollm2 $flag $name"
    guide: str
    extra: str = "conformance"
    """Extra of fd-core that its tests need."""
    suite: str = ""
    """Module in `fd_core.testing.hooks` and class of its kit, if kinds share a template of the test."""


RECIPES: Final[Mapping[PluginKind, ScaffoldRecipe]] = MappingProxyType(
    {
        PluginKind.BACKEND: ScaffoldRecipe(
            kind=plugins.BACKEND,
            suffix="Backend",
            files={
                "backend.py": (
                    "backends/backend_$framework.py",
                    "the device: availability, memory, limits",
                ),
                "ops.py": ("backends/ops_$framework.py", "the operations: those of $title, and those of the device"),
            },
            summary="$name, computed by $title",
            about=": models on $name, computed by $title.\nAs generated it runs on the CPU and reports *emulated*",
            prove="fdcore conformance $name   # compares the backend with the reference; --quick takes a minute",
            guide="write-a-backend.md",
        ),
        PluginKind.MODEL: ScaffoldRecipe(
            kind=plugins.MODEL,
            suffix="Family",
            files={"family.py": ("family.py", "the family: how its models differ from Llama, as data")},
            summary="Arcee",
            prove="fdcore conformance --model-family $name   # compares small models with transformers",
            use="fdcore serve arcee-ai/AFM-4.5B",
            guide="write-a-model.md",
            extra="families",
        ),
        PluginKind.SCHEDULER: ScaffoldRecipe(
            kind=plugins.SCHEDULER,
            suffix="Scheduler",
            files={"scheduler.py": ("scheduler.py", "the scheduler: what each step computes")},
            summary="static batching: requests enter and leave together",
            prove="fdcore conformance --scheduler $name   # verifies the invariants; --quick takes a minute",
            guide="write-a-scheduler.md",
        ),
        PluginKind.DRAFTER: ScaffoldRecipe(
            kind=plugins.DRAFTER,
            suffix="Drafter",
            files={"drafter.py": ("runner_hooks/drafter.py", "the drafter: the next tokens of a request")},
            summary="the tokens that followed the last one before",
            use='fdcore serve smollm2 $flag \'{"method": "$name"}\'',
            guide="write-a-drafter.md",
            suite="drafters.DrafterSuite",
        ),
        PluginKind.READING_DRAFTER: ScaffoldRecipe(
            kind=plugins.DRAFTER,
            suffix="Drafter",
            files={"drafter.py": ("runner_hooks/reading_drafter.py", "the drafter: the next tokens of all requests")},
            summary="the most likely tokens by a head that reads hidden states",
            use='fdcore serve MODEL $flag \'{"method": "$name"}\'   # MODEL has a layer for multi-token prediction',
            guide="write-a-drafter.md",
            suite="readers.ReadingDrafterSuite",
        ),
        PluginKind.SCHEDULING_POLICY: ScaffoldRecipe(
            kind=plugins.SCHEDULING_POLICY,
            suffix="Policy",
            files={"policy.py": ("policies/scheduling_policy.py", "the policy: the order of waiting requests")},
            summary="short prompts first, within limits",
            guide="write-a-policy.md",
        ),
        PluginKind.VICTIM_POLICY: ScaffoldRecipe(
            kind=plugins.VICTIMS,
            suffix="Policy",
            files={"policy.py": ("policies/victim_policy.py", "the policy: the request to preempt")},
            summary="the youngest of the least important requests",
            guide="write-a-policy.md",
        ),
        PluginKind.POSTPROCESS: ScaffoldRecipe(
            kind=plugins.POSTPROCESS,
            suffix="Postprocess",
            files={"postprocess.py": ("runner_hooks/postprocess.py", "the postprocessor: the token matrix of a step")},
            summary="looks up the tokens of each row in a table",
            prove="fdcore conformance --postprocess $name   # verifies the invariants",
            guide="write-a-postprocessor.md",
        ),
        PluginKind.STORE: ScaffoldRecipe(
            kind=plugins.STORE,
            suffix="Store",
            files={"store.py": ("store.py", "the store: named values outside the engine")},
            summary="an SQLite file",
            use="fdcore serve smollm2 --kv-store $name:kv.db",
            guide="write-a-store.md",
        ),
        PluginKind.CONNECTOR: ScaffoldRecipe(
            kind=plugins.CONNECTOR,
            suffix="Connector",
            files={"connector.py": ("connector.py", "the connector: how KV travels between two workers")},
            summary="files in a folder that both workers share",
            use="fdcore serve smollm2 --role decode --kv-connector $name",
            guide="write-a-connector.md",
        ),
        PluginKind.ROUTER_POLICY: ScaffoldRecipe(
            kind=plugins.ROUTER_POLICY,
            suffix="Policy",
            files={"policy.py": ("policies/router_policy.py", "the policy: the worker of a request")},
            summary="longest cached prefix among workers with few requests",
            use="fdcore route --policy $name --worker http://127.0.0.1:8001",
            guide="write-a-router-policy.md",
        ),
        PluginKind.LAUNCHER: ScaffoldRecipe(
            kind=plugins.LAUNCHER,
            suffix="Launcher",
            files={"launcher.py": ("launcher.py", "the launcher: where the processes of a deployment run")},
            summary="child processes on the cores of this machine",
            use="fdcore serve smollm2 --tensor-parallel-size 2 $flag $name",
            guide="write-a-launcher.md",
        ),
        PluginKind.SCALING_POLICY: ScaffoldRecipe(
            kind=plugins.SCALING_POLICY,
            suffix="Scaling",
            files={"policy.py": ("policies/scaling_policy.py", "the policy: the number of workers of a group")},
            summary="one worker for so many requests",
            use="fdcore cluster serve cluster.toml   # with policy = '$name' in a group",
            guide="write-a-scaling-policy.md",
        ),
        PluginKind.OBSERVER: ScaffoldRecipe(
            kind=plugins.OBSERVER,
            suffix="Observer",
            files={"observer.py": ("runner_hooks/observer.py", "the observer: what it does with sampled tokens")},
            summary="counts tokens and accepted drafts",
            guide="write-an-observer.md",
        ),
        PluginKind.TOOL_PARSER: ScaffoldRecipe(
            kind=plugins.TOOL_PARSER,
            suffix="Tools",
            files={"parser.py": ("parsers/tool_parser.py", "the parser: which parts of an answer are calls")},
            summary="calls on lines that begin with CALL",
            prove="fdcore conformance --tool-parser $name   # verifies the invariants",
            guide="write-a-parser.md",
        ),
        PluginKind.REASONING_PARSER: ScaffoldRecipe(
            kind=plugins.REASONING_PARSER,
            suffix="Reasoning",
            files={"parser.py": ("parsers/reasoning_parser.py", "the parser: which part of an answer is reasoning")},
            summary="from THINK: to ANSWER:",
            prove="fdcore conformance --reasoning-parser $name   # verifies the invariants",
            guide="write-a-parser.md",
        ),
    }
)


def write_project(
    name: str, kind: PluginKind, framework: Framework | None = None, folder: Path | None = None
) -> tuple[Path, tuple[str, ...]]:
    """Write a plugin's project, by default to a folder of that `name`; return the folder and the next commands."""
    recipe = RECIPES[kind]
    if framework is not None and kind is not PluginKind.BACKEND:
        raise ConfigError(f"a {recipe.kind.word} has no framework", field="--framework", hint="remove it")
    _check_name(name, recipe)
    words = _words(name, kind, framework or Framework.NUMPY)
    if folder is None:
        folder = Path(name)
        if folder.exists() or folder.is_symlink():
            hint = "choose another name, or another folder with --into; existing files are never overwritten"
            raise ConfigError(f"{folder} already exists", field="NAME", hint=hint)
    own = {f"$package/{file}": template for file, (template, _) in recipe.files.items()}
    templates = resources.files(__package__).joinpath("templates")
    files = {}
    for file, template in {**_FILES, **own}.items():
        source = templates.joinpath(f"{_filled(template, words)}.tmpl").read_text(encoding="utf-8") if template else ""
        files[folder / _filled(file, words)] = _filled(source, words)
    there = [str(path) for path in files if path.exists() or path.is_symlink()]
    if there:
        raise ConfigError(f"{there[0]} already exists, and is not overwritten", field="--into")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as new:
                new.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}", field="--into") from error
    commands = (f"cd {shlex.quote(str(folder))}", "pip install -e '.[test]'", f"fdcore plugins check {name}")
    return folder, (*commands, words["prove"].partition(" #")[0].rstrip())


def test_of(kind: PluginKind) -> str:
    """Return the name of the template of a kind's test; kinds of parsers have one, and those of drafters."""
    shared = next((each for each in ("parser", "drafter") if kind.endswith(each)), kind)
    return shared.replace("-", "_")


def _check_name(name: str, recipe: ScaffoldRecipe) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        hint = f"lower case letters and digits, in words joined by _, up to {_LONGEST_NAME}, such as mychip"
        raise ConfigError(f"{name!r} is not a valid name of a {recipe.kind.word}", field="NAME", hint=hint)
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name == "auto":
        raise ConfigError(f"{name!r} is a reserved word", field="NAME", hint="choose another, such as mychip")
    if name in plugins.Plugins.discover([]).offered(recipe.kind):
        raise ConfigError(f"{name} is a built-in {recipe.kind.word}", field="NAME", hint="choose another name")
    if name in plugins.KNOWN_PLUGINS:
        raise ConfigError(f"{name} is the plugin {plugins.KNOWN_PLUGINS[name]} of fd_core", field="NAME")
    package = f"fd_{name}"
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        giver = point.dist.name if point.dist else "an installed plugin"
        raise ConfigError(f"the name {name} is already used by {giver}", field="NAME", hint="choose another name")
    if importlib.util.find_spec(package) is not None:
        raise ConfigError(f"the package {package} already exists", field="NAME", hint="choose another name")


def _words(name: str, kind: PluginKind, framework: Framework) -> dict[str, str]:
    recipe = RECIPES[kind]
    camel = "".join(word.capitalize() for word in name.split("_"))
    kit, _, suite = recipe.suite.partition(".")
    extra = f"[{framework}]" if kind is PluginKind.BACKEND and framework is not Framework.NUMPY else ""
    words = {
        "name": name,
        "distribution": f"fd-{name.replace('_', '-')}",
        "package": f"fd_{name}",
        "test": test_of(kind),
        "constant": kind.replace("-", "_").upper(),
        "module": next(iter(recipe.files)).removesuffix(".py"),
        "cls": f"{camel}{recipe.suffix}",
        "ops": f"{camel}Ops",
        "hook": recipe.kind.hook,
        "flag": recipe.kind.flag,
        "what": recipe.kind.word,
        "guide": recipe.guide,
        "framework": framework.value,
        "title": TITLES[framework],
        "extra": recipe.extra,
        "kit": kit,
        "suite": suite,
        "requirement": f"fd-core{extra}>={'.'.join(fd_core.__version__.split('.')[:2])}",
        "contract": str(CONTRACT_VERSION),
    }
    files = "\n".join(f"| `$package/{file}` | {purpose} |" for file, (_, purpose) in recipe.files.items())
    texts = {"summary": recipe.summary, "about": recipe.about, "prove": recipe.prove, "use": recipe.use, "files": files}
    return words | {word: _filled(text, words) for word, text in texts.items()}


def _filled(text: str, words: Mapping[str, str]) -> str:
    return Template(text).substitute(words)
