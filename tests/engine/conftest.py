"""Fixtures for engines whose KV leaves the process."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, str]:
    """Settings with the files of both secrets."""
    file = tmp_path / "secret"
    file.write_bytes(b"of sixteen bytes")
    file.chmod(0o600)
    return {"transfer_secret_file": str(file), "kv_store_secret_file": str(file)}
