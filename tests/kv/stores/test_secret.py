import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fd_core.errors import ConfigError
from fd_core.kv.stores.secret import derive, load_secret


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def written(folder: Path, data: bytes, mode: int = 0o600) -> Path:
    file = folder / "secret"
    file.write_bytes(data)
    file.chmod(mode)
    return file


def test_keys_differ_by_purpose():
    keys = {derive(b"s" * 32, "envelope"), derive(b"s" * 32, "hash chain"), derive(b"t" * 32, "envelope")}
    assert [len(key) for key in keys] == [32] * 3
    assert derive(b"s" * 32, "envelope") in keys


def test_default_secret_is_created_once_and_private(cache):
    first = load_secret()
    assert len(first) >= 32
    assert load_secret() == first
    [file] = cache.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_concurrent_creation_yields_one_secret(cache):
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: load_secret(), range(64)))) == 1
    assert len(list(cache.iterdir())) == 1


def test_existing_secret_file_is_never_replaced(cache):
    cache.mkdir()
    own = cache / "kv-store-secret"
    own.write_bytes(b"")
    own.chmod(0o600)
    with pytest.raises(ConfigError, match="must have 16"):
        load_secret()
    assert own.read_bytes() == b""


def test_secret_file_is_read_without_newline(tmp_path):
    for end in (b"", b"\n", b"\r\n"):
        assert load_secret(written(tmp_path, b"correct horse battery" + end)) == b"correct horse battery"


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o620, 0o606])
def test_world_readable_secret_is_rejected(tmp_path, mode):
    with pytest.raises(ConfigError, match="accessible to other users") as caught:
        load_secret(written(tmp_path, b"x" * 32, mode))
    assert caught.value.field == "--kv-store-secret-file"


def test_group_readable_secret_is_accepted(tmp_path):
    assert load_secret(written(tmp_path, b"x" * 32, 0o640)) == b"x" * 32


@pytest.mark.parametrize("data", [b"", b"hunter2", b"fifteen bytes..\n", b"x" * 5000])
def test_secret_of_wrong_length_is_rejected_without_showing_it(tmp_path, data):
    with pytest.raises(ConfigError, match="must have 16 to 4096") as caught:
        load_secret(written(tmp_path, data))
    assert "hunter2" not in str(caught.value)


def test_non_regular_secret_file_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the secret"):
        load_secret(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ConfigError, match="secret"):
            load_secret(tmp_path / name)


def test_uncreatable_cache_folder_is_a_clear_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("FD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="cannot create the secret") as caught:
        load_secret()
    assert "at least 16 random bytes" in str(caught.value)


def test_unreadable_cache_folder_is_a_clear_error(monkeypatch, cache):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(ConfigError, match="cannot read the secret"):
        load_secret()
