"""The archive for a GPU without a network, and its steps, with doubles for the network and the GPU."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gpu_offline import bundle, step

SCRIPT = Path(step.__file__)
TARGET = {"python_version": "3.12", "sys_platform": "linux", "platform_machine": "x86_64"}


def test_packages_of_freeze_and_list_are_read():
    assert bundle.packages_in("torch==2.11.0+cu130\nPyYAML  6.0.2\nmarkdown_it-py\n\n# a remark\n") == {
        "torch": "2.11.0+cu130",
        "pyyaml": "6.0.2",
        "markdown-it-py": "",
    }


def test_everything_that_the_target_lacks_is_carried():
    found = bundle.needed(["fd-core"], {"numpy": ""}, TARGET)
    assert {"fd-core", "msgspec", "pyzmq", "llguidance", "starlette", "click"} <= found.keys()
    assert "numpy" not in found and "torch" not in found


def test_extras_are_followed():
    assert "pytest-timeout" not in bundle.needed(["fd-core"], {}, TARGET)
    assert "pytest-timeout" in bundle.needed(["fd-core[conformance]"], {}, TARGET)


@pytest.mark.parametrize(("version", "carried"), [("", False), ("0.29.0", False), ("0.27.1", True), ("0.9.0", True)])
def test_present_version_that_is_excluded_is_carried(version, carried):
    assert ("typer" in bundle.needed(["fd-core"], {"typer": version}, TARGET)) == carried


def test_package_of_unknown_version_is_named():
    with pytest.raises(SystemExit, match="no-such-package is not installed here"):
        bundle.needed(["no-such-package"], {}, TARGET)


def test_tags_include_those_of_older_systems():
    found = bundle.platforms("manylinux_2_28_x86_64")
    assert found[0] == "manylinux_2_28_x86_64"
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64"} <= set(found) and "manylinux_2_29_x86_64" not in found


def test_pieces_make_up_the_archive(tmp_path):
    file = tmp_path / "bundle.tar"
    file.write_bytes(bytes(range(250)))
    bundle.split(file, 100)
    pieces = sorted(tmp_path.iterdir())
    assert [each.name for each in pieces] == ["bundle.tar.00", "bundle.tar.01", "bundle.tar.02"]
    assert b"".join(each.read_bytes() for each in pieces) == bytes(range(250))


@pytest.fixture
def unpacked(tmp_path):
    """An unpacked archive, whose wheel has a program in place of the core's."""
    wheel = tmp_path / "wheels" / "fd_core-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("fd_core/__init__.py", "")
        files.writestr("fd_core/__main__.py", "print('the core of the archive')")
        files.writestr("fd_core-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: fd-core\nVersion: 1\n")
        files.writestr("fd_core-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files.writestr("fd_core-1.dist-info/RECORD", "")
    for name in ("gpu_offline/step.py", "gpu_session.py"):
        (tmp_path / "benchmarks" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "benchmarks/gpu_offline/step.py").write_bytes(SCRIPT.read_bytes())
    session = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('FD_CACHE')])); sys.exit(5)"
    (tmp_path / "benchmarks/gpu_session.py").write_text(session)
    (tmp_path / "cache").mkdir()
    return tmp_path


def test_steps_run_with_the_wheels_of_the_archive(unpacked):
    command = [sys.executable, str(unpacked / "benchmarks/gpu_offline/step.py"), "hardware", "http"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FD_CACHE")}
    for _ in range(2):  # the second call installs nothing
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=unpacked)
        assert done.returncode == 5, done.stderr
        shown, found = done.stdout.splitlines()[-2:]
        assert shown == "the core of the archive"
        results = ["--results", str(unpacked / "results")]
        assert json.loads(found) == [[*results, "--only", "hardware", "http"], str(unpacked / "cache")]


def test_folder_without_wheels_is_reported(tmp_path):
    with pytest.raises(SystemExit, match="no wheels in"):
        step.installed(tmp_path, tmp_path / "site")
