"""Backends on Paddle: their descriptions, and isolation of this process from Paddle."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import ClassVar

import pytest

from fd_core.backends import paddle as backends
from fd_core.backends import probing
from fd_core.backends.contract import Availability
from fd_core.backends.paddle import CpuPaddleBackend, PaddleBackend, PaddleDevices, paddle_devices, paddle_installed
from fd_core.config import EngineConfig
from fd_core.errors import ConfigError

needs_paddle = pytest.mark.skipif(not paddle_installed(), reason="Paddle is not installed; `nox -s paddle` tests it")


class Chip(PaddleBackend):
    name: ClassVar[str] = "chip"
    device: ClassVar[str] = "chip"
    title: ClassVar[str] = "chip"
    paddle_hint: ClassVar[str] = "install chippaddle"


class Emulated(Chip):
    can_be_emulated: ClassVar[bool] = True


@pytest.fixture
def seen(monkeypatch):
    """Return a function with Paddle's reply; None means no Paddle."""

    def answer(devices: PaddleDevices | None) -> None:
        monkeypatch.setattr(backends, "paddle_installed", lambda: devices is not None)
        monkeypatch.setattr(backends, "paddle_devices", lambda: devices)

    return answer


@pytest.mark.parametrize(
    ("devices", "backend", "expected"),
    [
        (None, Emulated, (False, "Paddle is not installed; install chippaddle", False)),
        (PaddleDevices("3.4", ("chip:0", "chip:1")), Emulated, (True, "Paddle 3.4 found 2 chip", False)),
        (PaddleDevices("3.4", ("chip",)), Chip, (True, "Paddle 3.4 found 1 chip", False)),
        (PaddleDevices("3.4", ("chip2:0",)), Chip, (False, "Paddle 3.4 found no chip; install chippaddle", False)),
        (PaddleDevices("3.4"), Emulated, (True, "emulated on the CPU: Paddle 3.4 found no chip", True)),
        (PaddleDevices("", problem="the driver broke"), Emulated, (False, "the driver broke", False)),
    ],
)
def test_device_is_present_emulated_or_missing(seen, devices, backend, expected):
    seen(devices)
    assert backend.probe() == Availability(*expected)


def test_emulated_device_is_reported_and_uses_cpu_float32(seen):
    seen(PaddleDevices("3.4"))
    backend = Emulated(EngineConfig(model="m", num_threads=3))
    assert backend.emulated
    assert backend.place == "cpu"
    assert backend.describe() == "chip emulated on the CPU, 3 threads, Paddle eager: no evidence for the hardware"
    assert backend._dtype() == "float32"
    assert set(backend.limits) == {"bfloat16"}
    with pytest.raises(ConfigError, match="the chip backend under emulation computes in float32, got bfloat16"):
        Emulated(EngineConfig(model="m", dtype="bfloat16")).make_ops()


def test_present_device_is_used(seen):
    seen(PaddleDevices("3.4", ("chip:0",)))
    backend = Emulated(EngineConfig(model="m"))
    assert not backend.emulated
    assert backend.place == "chip"
    assert "emulated" not in backend.describe()
    assert backend._dtype() == "bfloat16"
    assert not backend.limits
    assert Emulated(EngineConfig(model="m", dtype="float32"))._dtype() == "float32"


def test_cpu_is_not_reported_as_emulated(seen):
    seen(PaddleDevices("3.4"))
    backend = CpuPaddleBackend(EngineConfig(model="m", num_threads=1))
    assert not backend.emulated
    assert backend.describe() == "CPU, 1 thread, Paddle eager"
    assert backend.free_memory() > 0
    with pytest.raises(ConfigError, match=r"the cpu\+paddle backend computes in float32, got bfloat16"):
        CpuPaddleBackend(EngineConfig(model="m", dtype="bfloat16")).make_ops()


def ask(monkeypatch, folder: Path, source: str) -> PaddleDevices:
    """Return the reply of a Paddle whose module is `source`."""
    (folder / "paddle.py").write_text(source)
    monkeypatch.setattr(backends, "_built_for_processors", lambda: None)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return paddle_devices.__wrapped__()


DEVICES = "class device:\n    get_available_device = staticmethod(lambda: ['chip:0', 'xpu:0', 'xpu:1'])\n"
DEVICES += "is_compiled_with_cuda = lambda: False\n"


def test_paddle_is_probed_in_a_subprocess(monkeypatch, tmp_path):
    before = "paddle" in sys.modules
    found = ask(monkeypatch, tmp_path, f"print('noise')\n__version__ = '9.1'\n{DEVICES}")
    assert found == PaddleDevices("9.1", ("chip:0", "xpu:0", "xpu:1"), built_for_cuda=False)
    assert [found.count(device) for device in ("chip", "xpu", "cpu")] == [1, 2, 0]
    assert ("paddle" in sys.modules) == before


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("raise ImportError('libchip.so.2 is missing')", "ImportError: libchip.so.2 is missing"),
        ("import os; os._exit(3)", "exit status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit status -9"),
        ("import time; time.sleep(60)", "did not list its devices within 1 s"),
    ],
)
def test_broken_paddle_is_contained(monkeypatch, tmp_path, source, problem):
    if "sleep" in source:
        monkeypatch.setattr(probing, "_PATIENCE", 1.0)
    found = ask(monkeypatch, tmp_path, source)
    assert problem in found.problem
    assert found.names == ()


def test_module_in_working_directory_is_not_paddle(monkeypatch, tmp_path):
    (tmp_path / "paddle.py").write_text("open('imported', 'w')")
    monkeypatch.chdir(tmp_path)
    paddle_devices.__wrapped__()
    assert not (tmp_path / "imported").exists()


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)


@needs_paddle
def test_installed_paddle_matches_its_version_files(monkeypatch):
    in_process = paddle_devices.__wrapped__()
    monkeypatch.setattr(backends, "_built_for_processors", lambda: None)
    found = paddle_devices.__wrapped__()
    assert found.problem == ""
    assert found.version[0].isdigit()
    assert found == in_process


VERSION = (
    "full_version     = '3.3.1'\ncuda_version     = 'False'\nhip_version      = None\nxpu_xre_version  = 'False'\n"
)


@pytest.mark.parametrize(
    ("version", "probed"),
    [
        (VERSION, False),
        (VERSION.replace("cuda_version     = 'False'", "cuda_version     = '12.6'"), True),
        (VERSION.replace("xpu_xre_version  = 'False'", "xpu_xre_version  = '5.0.21'"), True),
        (VERSION.replace("None", "'6.1'"), True),
        (VERSION.replace("xpu_xre_version  = 'False'\n", ""), True),
        ("", True),
    ],
)
def test_only_device_capable_paddle_is_probed(monkeypatch, tmp_path, version, probed):
    package = tmp_path / "paddle"
    (package / "version").mkdir(parents=True)
    (package / "version" / "__init__.py").write_text(version)
    spec = ModuleSpec("paddle", None, origin=str(package / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: spec)
    monkeypatch.delenv("CUSTOM_DEVICE_ROOT", raising=False)
    assert backends._built_for_processors() == (None if probed else "3.3.1")
    (tmp_path / "paddle_custom_device").mkdir()
    assert backends._built_for_processors() is None, "a plugin for another device is installed"


@needs_paddle
def test_importing_paddle_keeps_signals_and_prints_nothing():
    code = """
import os, signal
def handler(*_): print("mine", flush=True)
signal.signal(signal.SIGTERM, handler)
import fd_core.ops.paddle.framework
os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
os.kill(os.getpid(), signal.SIGTERM)
"""
    ended = run(code)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("mine\n", "", -15)


@needs_paddle
def test_cpu_has_no_bfloat16():
    from fd_core.ops.paddle.ops import PaddleOps

    with pytest.raises(ValueError, match="Paddle does not multiply bfloat16 matrices on a CPU"):
        PaddleOps("bfloat16")
    with pytest.raises(ValueError, match="expected a dtype of float32, bfloat16, got 'int8'"):
        PaddleOps("int8")
    assert CpuPaddleBackend(EngineConfig(model="m", num_threads=1)).make_ops().dtype == "float32"
