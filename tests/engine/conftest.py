"""Fixtures for engines with injected faults, and for those whose KV leaves the process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fd_core.plugins import installed_plugins
from tests.engine.faults import Faults


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    faults = Faults(tmp_path, monkeypatch)
    yield faults
    faults.release(99)  # threads that hold
    installed_plugins.cache_clear()


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, Any]:
    """Settings with the files of both secrets, and a timeout that a busy machine does not exceed."""
    file = tmp_path / "secret"
    file.write_bytes(b"of sixteen bytes")
    file.chmod(0o600)
    return {"transfer_secret_file": str(file), "kv_store_secret_file": str(file), "kv_store_timeout": 60.0}
