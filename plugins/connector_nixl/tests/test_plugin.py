"""How the core finds the connector, and what it hears without NIXL."""

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


def test_the_installed_plugin_offers_it() -> None:
    plugins = Plugins.discover()
    assert plugins.offered(CONNECTOR)["nixl"].origin.distribution == "fd-connector-nixl"
    assert plugins.load(CONNECTOR, "nixl") is NixlConnector


def test_finding_it_imports_no_nixl() -> None:
    code = (
        "import sys, fd_connector_nixl.connector; fd_connector_nixl.fd_register_connectors();"
        "sys.exit(any(name.startswith('nixl') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_nixl_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_MODULES", ("fd_no_nixl",))
    with pytest.raises(PluginError, match="pip install 'nixl-cu13") as caught:
        NixlConnector(ConnectorSettings())
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("init", "said"),
    [("raise ImportError('libfabric.so is missing')", "libfabric.so is missing"), ("", "has no nixl_agent")],
    ids=["broken", "another version"],
)
def test_a_nixl_that_cannot_be_used_is_no_traceback(
    init: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fd_bad_nixl").mkdir()
    (tmp_path / "fd_bad_nixl" / "__init__.py").write_text(init)
    (tmp_path / "fd_bad_nixl" / "_bindings.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(settings, "_MODULES", ("fd_bad_nixl",))
    monkeypatch.delitem(sys.modules, "fd_bad_nixl", raising=False)
    with pytest.raises(PluginError, match=said):
        NixlConnector(ConnectorSettings())


def test_a_variable_of_ucx_is_refused_before_nixl_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_MODULES", ("fd_no_nixl",))
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    with pytest.raises(ConfigError, match="UCX_NET_DEVICES"):
        NixlConnector(ConnectorSettings())


@needs_nixl
def test_it_says_that_it_listens_and_checks_nobody(caplog: pytest.LogCaptureFixture) -> None:
    NixlConnector(ConnectorSettings()).close()
    assert "devices lo without authentication" in caplog.text


@needs_nixl
def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_NIXL_NET_DEVICES", "nosuch0")
    with pytest.raises(PluginError, match="nosuch0") as caught:
        NixlConnector(ConnectorSettings())
    assert caught.value.exit_code == 4
