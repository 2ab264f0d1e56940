"""How fast KV blocks travel here."""

from __future__ import annotations

from pathlib import Path

import pytest

from fd_core.simulation.costs.calibrating import disk_links, transfer_link

BLOCK = 1 << 18


def test_a_block_takes_longer_to_another_worker_than_none() -> None:
    link = transfer_link(BLOCK)
    assert 0.0 < link.seconds(BLOCK) < 1.0
    assert link.source.startswith("measured")


def test_a_store_is_measured_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_CACHE", str(tmp_path))
    for link in disk_links(BLOCK):
        assert 0.0 < link.seconds(BLOCK) < 5.0
        assert "disk store" in link.source
    assert not list(tmp_path.iterdir())
