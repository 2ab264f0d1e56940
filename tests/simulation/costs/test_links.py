"""Measured transfer speed of KV blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from fd_core.simulation.costs.calibrating import disk_links, transfer_link

BLOCK = 1 << 18


def test_sending_a_block_takes_longer_than_sending_none() -> None:
    link = transfer_link(BLOCK)
    assert 0.0 < link.seconds(BLOCK) < 1.0
    assert link.source.startswith("measured")


def test_store_measurement_leaves_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_CACHE", str(tmp_path))
    for link in disk_links(BLOCK):
        assert 0.0 < link.seconds(BLOCK) < 5.0
        assert "disk store" in link.source
    assert not list(tmp_path.iterdir())
