"""Discovery of the launcher by the core, and its errors without Ray or without a cluster."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fd_core.errors import PluginError
from fd_core.launching.contract import LaunchError
from fd_core.plugins import LAUNCHER, Plugins
from needs import needs_ray

from fd_launcher_ray.launcher import RayLauncher


def test_installed_plugin_offers_it() -> None:
    plugins = Plugins.discover()
    assert plugins.offered(LAUNCHER)["ray"].origin.distribution == "fd-launcher-ray"
    assert plugins.load(LAUNCHER, "ray") is RayLauncher


def test_finding_it_imports_no_ray() -> None:
    code = (
        "import sys, fd_launcher_ray.launcher; fd_launcher_ray.fd_register_launchers();"
        "sys.exit(any(name.partition('.')[0] == 'ray' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_ray_is_reported_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PluginError, match="pip install 'ray") as caught:
        RayLauncher()
    assert caught.value.exit_code == 4


@needs_ray
def test_invalid_address_is_reported_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(LaunchError, match="ray start --head"):
        RayLauncher()


@needs_ray
def test_missing_cluster_is_reported_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(address: str, **_: object) -> None:
        assert address == "auto"
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Ray itself would find any cluster of this machine, such as that of the other tests.
    monkeypatch.setattr("ray.init", init)
    with pytest.raises(LaunchError, match="ray start --head"):
        RayLauncher()
