"""Discovery of the backend by the core, and its own settings."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from fd_core.backends import paddle as backends
from fd_core.backends.paddle import PaddleDevices
from fd_core.config import EngineConfig
from fd_core.plugins import BACKEND, Plugins

from fd_metax.backend import MetaxBackend


def seen(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Fake an installed Paddle that sees these devices."""
    monkeypatch.setattr(backends, "paddle_installed", lambda: True)
    monkeypatch.setattr(backends, "paddle_devices", lambda: PaddleDevices("3.3", names))


def test_it_is_offered_by_the_installed_plugin() -> None:
    plugins = Plugins.discover()
    assert plugins.offered(BACKEND)["metax"].origin.distribution == "fd-metax"
    assert plugins.load(BACKEND, "metax") is MetaxBackend


def test_discovery_imports_no_framework_and_no_backend() -> None:
    loaded = "sys.exit(bool({'paddle', 'fd_metax.backend'} & {*sys.modules}))"
    code = f"import sys, fd_metax; fd_metax.fd_register_backends(); {loaded}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_metax_gpu_is_used_by_its_name_in_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, "metax_gpu:0", "metax_gpu:1")
    assert MetaxBackend.probe().reason == "Paddle 3.3 found 2 MetaX GPU"
    assert MetaxBackend(EngineConfig(model="m")).place == "metax_gpu"


def test_without_a_device_it_is_emulated_only_by_name_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, "xpu:0")
    plugins = Plugins.discover()
    assert plugins.choose_backend("auto").name != "metax"
    assert "emulated" in plugins.choose_backend("metax").reason
    backend = MetaxBackend(EngineConfig(model="m"))
    assert (backend.emulated, backend.place) == (True, "cpu")
    assert "emulated" in backend.describe()
    assert backend.free_memory() > 0


def test_free_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paddle's own functions over a fake runtime; the properties are those that it selects for a MetaX device."""
    pytest.importorskip("paddle")
    from fd_core.ops.paddle.framework import paddle
    from paddle.device import gpgpu_backend

    runtime = paddle.base.core
    monkeypatch.setattr(paddle.device, "get_device_properties", gpgpu_backend.get_device_properties)
    properties = {("metax_gpu", 0): SimpleNamespace(total_memory=1000)}
    monkeypatch.setattr(runtime, "get_device_properties", lambda *device: properties[device], raising=False)
    monkeypatch.setattr(
        runtime, "device_memory_stat_current_value", lambda kind, index: {"Reserved": 300}[kind] + index
    )
    seen(monkeypatch, "metax_gpu:0")
    assert MetaxBackend(EngineConfig(model="m")).free_memory() == 700
