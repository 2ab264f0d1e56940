"""Discovery of the backend by the core, and its own settings."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fd_core.backends import paddle as backends
from fd_core.backends.paddle import PaddleDevices
from fd_core.config import EngineConfig
from fd_core.plugins import BACKEND, Plugins

from fd_xpu.backend import XpuBackend


def seen(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Fake an installed Paddle that sees these devices."""
    monkeypatch.setattr(backends, "paddle_installed", lambda: True)
    monkeypatch.setattr(backends, "paddle_devices", lambda: PaddleDevices("3.3", names))


def test_it_is_offered_by_the_installed_plugin() -> None:
    plugins = Plugins.discover()
    assert plugins.offered(BACKEND)["xpu"].origin.distribution == "fd-xpu"
    assert plugins.load(BACKEND, "xpu") is XpuBackend


def test_discovery_imports_no_framework_and_no_backend() -> None:
    loaded = "sys.exit(bool({'paddle', 'fd_xpu.backend'} & {*sys.modules}))"
    code = f"import sys, fd_xpu; fd_xpu.fd_register_backends(); {loaded}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_xpu_is_used_by_its_name_in_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, "xpu:0", "xpu:1")
    assert XpuBackend.probe().reason == "Paddle 3.3 found 2 XPU"
    assert XpuBackend(EngineConfig(model="m")).place == "xpu"


def test_without_a_device_it_is_emulated_only_by_name_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, "metax_gpu:0")
    plugins = Plugins.discover()
    assert plugins.choose_backend("auto").name != "xpu"
    assert "emulated" in plugins.choose_backend("xpu").reason
    backend = XpuBackend(EngineConfig(model="m"))
    assert (backend.emulated, backend.place) == (True, "cpu")
    assert "emulated" in backend.describe()
    assert backend.free_memory() > 0


def test_free_memory_is_that_of_the_current_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paddle's own functions over a fake runtime: they reject names without an index."""
    pytest.importorskip("paddle")
    from fd_core.ops.paddle.framework import paddle

    runtime = paddle.base.core
    for name, value in {
        "is_compiled_with_xpu": lambda: True,
        "get_xpu_current_device_id": lambda: 1,
        "get_xpu_device_total_memory": [0, 1000].__getitem__,
        "get_xpu_device_used_memory": [0, 300].__getitem__,
    }.items():
        monkeypatch.setattr(runtime, name, value, raising=False)
    seen(monkeypatch, "xpu:0", "xpu:1")
    assert XpuBackend(EngineConfig(model="m")).free_memory() == 700
