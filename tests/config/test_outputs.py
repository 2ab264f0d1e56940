"""Files are replaced atomically."""

from __future__ import annotations

from pathlib import Path

import pytest

from fd_core.config.outputs import write_whole
from fd_core.errors import ConfigError


def test_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in (b"one", b"two"):
        write_whole(path, content, "--json")
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"one", "--json")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="no space left on device"):
        write_whole(path, b"two", "--json")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]
