"""`fdcore plugins new` writes a project that is whole, clean and sound, under a name that can be used."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from fd_core.cli.scaffold import Framework
from fd_core.cli.scaffold.project import write_project
from fd_core.errors import ConfigError
from tests.plugin_sites import installed

pytestmark = pytest.mark.slow

ROOTS = {"torch": "torch", "paddle": "paddle", "onnx": "onnxruntime", "numpy": "numpy"}
"""Frameworks to the modules they need."""
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


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """A project of each framework, by framework."""
    folder = tmp_path_factory.mktemp("projects")
    return {
        framework: write_project(f"some_chip_{framework}", framework, folder / framework.value)
        for framework in Framework
    }


@pytest.mark.parametrize("framework", Framework)
def test_the_project_is_whole(projects, framework):
    project = projects[framework]
    package = f"fd_some_chip_{framework}"
    files = {path.relative_to(project).as_posix(): path for path in project.rglob("*") if path.is_file()}
    assert {"pyproject.toml", "README.md", ".gitignore", "tests/test_conformance.py"} <= set(files)
    assert {f"{package}/{name}" for name in ("__init__.py", "backend.py", "ops.py", "py.typed")} <= set(files)
    for name, path in files.items():
        assert "$" not in path.read_text(), name
    assert "class SomeChip" in files[f"{package}/ops.py"].read_text()
    assert f'some_chip_{framework} = "{package}"' in files["pyproject.toml"].read_text()


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
@pytest.mark.parametrize("framework", Framework)
@pytest.mark.parametrize("name", ["a", LONGEST])
def test_the_project_is_clean(tmp_path, framework, name):
    write_project(name, framework, tmp_path)
    run(tmp_path, "-m", "ruff", "check", ".")
    run(tmp_path, "-m", "ruff", "format", "--check", ".")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_the_projects_are_typed(projects):
    packages = [str(next(project.glob("fd_*"))) for project in projects.values()]
    run(projects[Framework.NUMPY], "-m", "mypy", "--strict", "--config-file=pyproject.toml", *packages)


@pytest.mark.parametrize("framework", Framework)
def test_the_plugin_is_in_order(projects, framework):
    project = projects[framework]
    installed(project)
    said = run(project, "-m", "fd_core.cli", "plugins", "check", f"some_chip_{framework}")
    assert "nothing is wrong" in said
    if importlib.util.find_spec(ROOTS[framework]):
        assert f"backend some_chip_{framework} can run here: emulated" in said


@pytest.mark.parametrize("framework", [each for each in Framework if importlib.util.find_spec(ROOTS[each])])
def test_operations_and_fusions_conform(projects, framework):
    project, name = projects[framework], f"some_chip_{framework}"
    installed(project)
    card = run(project, "-m", "fd_core.cli", "conformance", name, "--quick", "-k", "operations or fusions")
    assert f"{name} passes" in card
    assert "emulated" in card


@pytest.mark.parametrize("framework, setting", [(Framework.TORCH, "DEVICE"), (Framework.ONNX, "PROVIDER")])
def test_a_device_that_nothing_looks_for_is_not_available(tmp_path, framework, setting):
    project = write_project("mychip", framework, tmp_path)
    installed(project)
    file = project / "fd_mychip" / "backend.py"
    file.write_text(re.sub(f'^{setting} = ".*"', f'{setting} = "npu"', file.read_text(), flags=re.MULTILINE))
    said = run(project, "-m", "fd_core.cli", "plugins", "check", "mychip")
    if importlib.util.find_spec(ROOTS[framework]):
        assert "cannot run here: nothing looks for npu yet: write that in MychipBackend.probe" in said


@pytest.mark.parametrize(
    "name, words",
    [
        *(
            (name, "cannot be the name of a backend")
            for name in ("MyChip", "my-chip", "1chip", "_chip", "chip_", "a__b")
        ),
        *((name, "cannot be the name of a backend") for name in ("", "chip+paddle", "../chip", "ch\nip", "x" * 41)),
        *((name, "is a reserved word") for name in ("class", "match", "auto")),
        *((name, "is a backend of fd_core itself") for name in ("cpu", "reference", "null")),
        ("gpu_cuda", "is the project's own plugin fd-gpu-cuda"),
        ("core", "the package fd_core exists already"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(tmp_path, name, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")) as caught:
        write_project(name, Framework.NUMPY, tmp_path / "project")
    assert caught.value.field == "NAME"
    assert not (tmp_path / "project").exists()


def test_a_name_that_an_installed_plugin_has_is_refused(projects, monkeypatch, tmp_path):
    project = projects[Framework.NUMPY]
    installed(project)
    monkeypatch.syspath_prepend(str(project))
    with pytest.raises(ConfigError, match="the name some_chip_numpy is taken by fd-some-chip-numpy"):
        write_project("some_chip_numpy", Framework.NUMPY, tmp_path)


@pytest.mark.parametrize("there", ["pyproject.toml", "fd_mychip/ops.py", ".gitignore"])
def test_nothing_is_overwritten(tmp_path, there):
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).write_text("mine")
    (tmp_path / "notes.txt").write_text("mine as well")
    with pytest.raises(ConfigError, match="is there already, and nothing is overwritten"):
        write_project("mychip", Framework.TORCH, tmp_path)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {there.rpartition("/")[2], "notes.txt"}
    assert (tmp_path / there).read_text() == "mine"


def test_a_folder_with_other_files_may_take_the_project(tmp_path):
    (tmp_path / "LICENSE").write_text("mine")
    write_project("mychip", Framework.TORCH, tmp_path)
    assert (tmp_path / "LICENSE").read_text() == "mine"
    assert (tmp_path / "fd_mychip" / "ops.py").is_file()


def test_the_command_writes_into_the_working_folder_and_says_where(tmp_path):
    said = run(tmp_path, "-m", "fd_core.cli", "plugins", "new", "my_chip", "--framework", "numpy")
    assert "fd-my-chip" in said
    assert (tmp_path / "fd-my-chip" / "fd_my_chip" / "backend.py").is_file()


def test_a_folder_that_cannot_be_written_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*file.*: File exists"):
        write_project("mychip", Framework.NUMPY, tmp_path / "file")
