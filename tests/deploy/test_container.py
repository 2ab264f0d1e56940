"""The container file names existing files, and builds an image that runs without privileges."""

from __future__ import annotations

import platform
import re
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

import fd_core
from fd_core.cli.app import app
from fd_core.ops.native import build
from tests.deploy.manifests import CHART, DEPLOY, ROOT, objects, of_kind, pods, programs

TEXT = (DEPLOY / "Containerfile").read_text()
STEPS = [line for line in re.sub(r"\\\n", " ", TEXT).splitlines() if line and not line.startswith("#")]


def words(instruction: str) -> list[list[str]]:
    return [step.split()[1:] for step in STEPS if step.split()[0] == instruction]


def test_copied_files_exist_and_are_not_ignored() -> None:
    sent = {
        line[1:] for line in (DEPLOY / "Containerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied = {source for step in words("COPY") if not step[0].startswith("--from") for source in step[:-1]}
    assert copied == sent
    assert all((ROOT / source).exists() for source in copied)


def test_extras_and_plugins_of_the_image_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"EXTRAS=([\w,]+)", TEXT)
    assert asked and {each for extra in asked for each in extra.split(",")} <= extras.keys()
    named = re.findall(r'PLUGINS="?([\w ]+)', TEXT)
    assert named and all((ROOT / "plugins" / one / "pyproject.toml").exists() for each in named for one in each.split())


@pytest.mark.parametrize(("machine", "sets"), [("x86_64", set(build.PORTABLE)), ("aarch64", {"generic"})])
def test_kernels_of_the_image_are_those_of_its_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str, sets: set[str]
) -> None:
    (named,) = re.findall(r"^ARG KERNELS=(\w+)$", TEXT, re.MULTILINE)
    compiled = set[str]()
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "_PACKAGED", tmp_path)
    monkeypatch.setattr(build, "_compile", lambda isa, path: compiled.add(isa))
    build.add_to_package(named)
    assert compiled == sets
    assert f"python -P -m {build.__name__} ${{KERNELS}}" in TEXT


def test_image_runs_as_the_user_that_the_manifests_name() -> None:
    (user,) = words("USER")
    number = int(user[0].partition(":")[0])
    assert number > 0 and f"--uid {number}" in TEXT
    for name in ("mixed", "pairs", "hpa"):
        for pod, _ in programs(objects(name)).values():
            assert pod["spec"]["securityContext"]["runAsUser"] == number


def test_image_starts_an_existing_command() -> None:
    (entry,), (command,) = (re.findall(rf"^{name} \[(.*)\]$", TEXT, re.MULTILINE) for name in ("ENTRYPOINT", "CMD"))
    assert entry.split(", ")[-1] == '"fdcore"'
    verb, *rest = [word.strip('"') for word in command.split(", ")]
    get_command(app).commands[verb].make_context(verb, rest)  # type: ignore[attr-defined]


def test_versions_of_chart_image_and_program_agree() -> None:
    version = fd_core.__version__
    chart = (CHART / "Chart.yaml").read_text()
    assert f"appVersion: {version}\n" in chart
    images = {pod["spec"]["containers"][0]["image"] for pod, _ in programs(objects("mixed")).values()}
    assert images == {f"fd-core:{version}"}


def test_every_image_has_a_version() -> None:
    for name in ("mixed", "pairs", "hpa"):
        found = objects(name)
        assert list(of_kind(found, "StatefulSet"))
        for pod in pods(found).values():
            for container in pod["spec"]["containers"]:
                assert re.search(r":\d", container["image"]), container["image"]
