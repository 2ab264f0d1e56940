"""`fdcore plugins new` writes a complete, lint-free, sound project under a valid name."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fd_core.cli.plugins.scaffold import Framework, PluginKind
from fd_core.cli.plugins.scaffold.project import RECIPES, write_project
from fd_core.errors import ConfigError
from tests.plugin_sites import installed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ROOTS = {"torch": "torch", "paddle": "paddle", "onnx": "onnxruntime", "numpy": "numpy"}
"""Frameworks to the modules they need."""
BACKENDS = [(PluginKind.BACKEND, framework) for framework in Framework]
PROJECTS = [*BACKENDS, *((kind, None) for kind in PluginKind if kind is not PluginKind.BACKEND)]
each_project = pytest.mark.parametrize(("kind", "framework"), PROJECTS, ids=lambda value: value and str(value))
LONGEST = "x" * 40


def run(folder, *command):
    path = os.pathsep.join([str(folder), *sys.path])
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def name_of(kind, framework):
    return f"some_{framework or kind}".replace("-", "_")


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """Return the folder of each installed project, by kind and framework."""
    folder = tmp_path_factory.mktemp("projects")
    written = {}
    for kind, framework in PROJECTS:
        project = write_project(name_of(kind, framework), kind, framework, folder / name_of(kind, framework))[0]
        installed(project)
        written[kind, framework] = project
    return written


@each_project
def test_project_is_complete(projects, kind, framework):
    project = projects[kind, framework]
    package = f"fd_{name_of(kind, framework)}"
    files = {path.relative_to(project).as_posix(): path for path in project.rglob("*") if path.is_file()}
    assert {"pyproject.toml", "README.md", ".gitignore", "tests/test_conformance.py"} <= set(files)
    own = {f"{package}/{file}" for file in RECIPES[kind].files}
    assert {f"{package}/__init__.py", f"{package}/py.typed", *own} <= set(files)
    for name, path in files.items():
        assert "$" not in path.read_text(), name
    for name in own:
        assert "class Some" in files[name].read_text()
    assert f'{name_of(kind, framework)} = "{package}"' in files["pyproject.toml"].read_text()
    readme = files["README.md"].read_text()
    assert f"docs/extend/{RECIPES[kind].guide}" in readme and (ROOT / "docs" / "extend" / RECIPES[kind].guide).is_file()


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
@pytest.mark.parametrize("name", ["a", LONGEST])
def test_projects_pass_ruff(tmp_path, name):
    for kind, framework in PROJECTS:
        write_project(name, kind, framework, tmp_path / name_of(kind, framework))
    run(tmp_path, "-m", "ruff", "check", ".")
    run(tmp_path, "-m", "ruff", "format", "--check", ".")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_projects_pass_mypy(projects):
    packages = [
        str(path) for project in projects.values() for path in project.glob("fd_*") if (path / "py.typed").exists()
    ]
    run(
        projects[PluginKind.BACKEND, Framework.NUMPY],
        "-m",
        "mypy",
        "--strict",
        "--config-file=pyproject.toml",
        *packages,
    )


def test_projects_pass_plugins_check(projects, monkeypatch):
    for project in projects.values():
        monkeypatch.syspath_prepend(str(project))
    output = run(projects[PluginKind.STORE, None], "-m", "fd_core.cli", "plugins", "check")
    assert "no problems found" in output
    for kind, framework in PROJECTS:
        name = name_of(kind, framework)
        assert f"fd-{name.replace('_', '-')} 0.1.0: {name}" in output
        if framework and importlib.util.find_spec(ROOTS[framework]):
            assert f"backend {name} can run here: emulated" in output


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(each, marks=() if each is Framework.NUMPY else pytest.mark.soak)
        for each in Framework
        if importlib.util.find_spec(ROOTS[each])
    ],
)
def test_attention_conforms(projects, framework):
    project, name = projects[PluginKind.BACKEND, framework], name_of(PluginKind.BACKEND, framework)
    card = run(project, "-m", "fd_core.cli", "conformance", name, "--quick", "-k", "test_attention")
    assert f"{name} passes" in card
    assert "emulated" in card


@pytest.mark.parametrize(
    "framework, setting",
    [
        pytest.param(
            *(framework, setting),
            marks=pytest.mark.skipif(not importlib.util.find_spec(ROOTS[framework]), reason=f"no {framework} here"),
        )
        for framework, setting in ((Framework.TORCH, "DEVICE"), (Framework.ONNX, "PROVIDER"))
    ],
)
def test_device_without_a_probe_is_not_available(tmp_path, framework, setting):
    project = write_project("mychip", PluginKind.BACKEND, framework, tmp_path)[0]
    installed(project)
    file = project / "fd_mychip" / "backend.py"
    file.write_text(re.sub(f'^{setting} = ".*"', f'{setting} = "npu"', file.read_text(), flags=re.MULTILINE))
    output = run(project, "-m", "fd_core.cli", "plugins", "check", "mychip")
    assert "cannot run here: detection of npu is not implemented yet: add it to MychipBackend.probe" in output


@pytest.mark.parametrize(
    "name, words",
    [
        *(
            (name, "is not a valid name of a backend")
            for name in ("MyChip", "my-chip", "1chip", "_chip", "chip_", "a__b")
        ),
        *((name, "is not a valid name of a backend") for name in ("", "chip+paddle", "../chip", "ch\nip", "x" * 41)),
        *((name, "is a reserved word") for name in ("class", "match", "auto")),
        *((name, "is a built-in backend") for name in ("cpu", "reference", "null")),
        ("gpu_cuda", "is the plugin fd-gpu-cuda of fd_core"),
        ("core", "the package fd_core already exists"),
    ],
)
def test_invalid_name_is_rejected(tmp_path, name, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")) as caught:
        write_project(name, PluginKind.BACKEND, folder=tmp_path / "project")
    assert caught.value.field == "NAME"
    assert not (tmp_path / "project").exists()


def test_name_of_an_installed_plugin_is_rejected(projects, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(projects[PluginKind.STORE, None]))
    with pytest.raises(ConfigError, match="the name some_store is already used by fd-some-store"):
        write_project("some_store", PluginKind.SCHEDULER, folder=tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (PluginKind.SCHEDULER, "continuous", "continuous is a built-in scheduler"),
        (PluginKind.POSTPROCESS, "torch", "torch is a built-in postprocessor"),
        (PluginKind.STORE, "disk", "disk is a built-in KV store"),
        (PluginKind.CONNECTOR, "tcp", "tcp is a built-in connector"),
        (PluginKind.ROUTER_POLICY, "session", "session is a built-in router policy"),
        (PluginKind.TOOL_PARSER, "hermes", "hermes is a built-in tool parser"),
        (PluginKind.REASONING_PARSER, "qwen3", "qwen3 is a built-in reasoning parser"),
        (PluginKind.ROUTER_POLICY, "my-policy", "is not a valid name of a router policy"),
    ],
)
def test_each_kind_has_reserved_names(tmp_path, kind, name, words):
    with pytest.raises(ConfigError, match=words):
        write_project(name, kind, folder=tmp_path / "project")


def test_only_a_backend_begins_with_a_framework(tmp_path):
    with pytest.raises(ConfigError, match="a scheduler has no framework") as caught:
        write_project("mine", PluginKind.SCHEDULER, Framework.TORCH, tmp_path / "project")
    assert (caught.value.field, caught.value.exit_code) == ("--framework", 2)


@pytest.mark.parametrize("there", ["pyproject.toml", "fd_mychip/ops.py", ".gitignore"])
def test_nothing_is_overwritten(tmp_path, there):
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).write_text("mine")
    (tmp_path / "notes.txt").write_text("mine as well")
    with pytest.raises(ConfigError, match="already exists, and is not overwritten"):
        write_project("mychip", PluginKind.BACKEND, Framework.TORCH, tmp_path)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {there.rpartition("/")[2], "notes.txt"}
    assert (tmp_path / there).read_text() == "mine"


def test_folder_with_other_files_may_take_the_project(tmp_path):
    (tmp_path / "LICENSE").write_text("mine")
    write_project("mychip", PluginKind.BACKEND, Framework.TORCH, tmp_path)
    assert (tmp_path / "LICENSE").read_text() == "mine"
    assert (tmp_path / "fd_mychip" / "ops.py").is_file()


def test_command_creates_the_folder_and_prints_next_steps(tmp_path):
    output = run(tmp_path, "-m", "fd_core.cli", "plugins", "new", "mine", "--kind", "router-policy")
    assert output.splitlines() == [
        "wrote mine; next:",
        "  cd mine",
        "  pip install -e '.[test]'",
        "  fdcore plugins check mine",
        "  pytest",
    ]
    assert (tmp_path / "mine" / "fd_mine" / "policy.py").is_file()


def test_existing_folder_is_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="mine already exists") as caught:
        write_project("mine", PluginKind.STORE)
    assert (caught.value.field, caught.value.exit_code) == ("NAME", 2)
    assert not list((tmp_path / "mine").iterdir())


def test_unwritable_folder_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*file.*: File exists"):
        write_project("mychip", PluginKind.BACKEND, folder=tmp_path / "file")
