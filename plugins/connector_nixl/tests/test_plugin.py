"""Discovery of the connector by the core, and its errors without NIXL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fd_core.disagg.connectors.contract import ConnectorSettings
from fd_core.errors import ConfigError, PluginError
from fd_core.plugins import CONNECTOR, Plugins
from needs import needs_nixl

from fd_connector_nixl import settings
from fd_connector_nixl.connector import NixlConnector


def test_installed_plugin_offers_it() -> None:
    plugins = Plugins.discover()
    assert plugins.offered(CONNECTOR)["nixl"].origin.distribution == "fd-connector-nixl"
    assert plugins.load(CONNECTOR, "nixl") is NixlConnector


def test_finding_it_imports_no_nixl() -> None:
    code = (
        "import sys, fd_connector_nixl.connector; fd_connector_nixl.fd_register_connectors();"
        "sys.exit(any(name.startswith('nixl') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_nixl_is_reported_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_MODULES", ("fd_no_nixl",))
    with pytest.raises(PluginError, match="pip install 'nixl-cu13") as caught:
        NixlConnector(ConnectorSettings())
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("init", "message"),
    [("raise ImportError('libfabric.so is missing')", "libfabric.so is missing"), ("", "has no nixl_agent")],
    ids=["broken", "another version"],
)
def test_unusable_nixl_is_reported_without_a_traceback(
    init: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fd_bad_nixl").mkdir()
    (tmp_path / "fd_bad_nixl" / "__init__.py").write_text(init)
    (tmp_path / "fd_bad_nixl" / "_bindings.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(settings, "_MODULES", ("fd_bad_nixl",))
    monkeypatch.delitem(sys.modules, "fd_bad_nixl", raising=False)
    with pytest.raises(PluginError, match=message):
        NixlConnector(ConnectorSettings())


def test_conflicting_ucx_variable_is_rejected_before_importing_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_MODULES", ("fd_no_nixl",))
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    with pytest.raises(ConfigError, match="UCX_NET_DEVICES"):
        NixlConnector(ConnectorSettings())


@needs_nixl
def test_warning_about_listening_without_authentication(caplog: pytest.LogCaptureFixture) -> None:
    NixlConnector(ConnectorSettings()).close()
    assert "devices lo without authentication" in caplog.text


@needs_nixl
def test_missing_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_NIXL_NET_DEVICES", "nosuch0")
    with pytest.raises(PluginError, match="nosuch0") as caught:
        NixlConnector(ConnectorSettings())
    assert caught.value.exit_code == 4
