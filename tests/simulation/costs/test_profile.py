"""Profile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fd_core.errors import ConfigError
from fd_core.simulation.costs.naming import profile_named
from fd_core.simulation.costs.profile import read_profile, write_profile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    write_profile(profile_named("h100:llama-70b:tp=8"), path)
    return path


def test_profile_round_trips_through_file(path: Path) -> None:
    assert read_profile(path) == profile_named("h100:llama-70b:tp=8")
    assert [each.name for each in path.parent.iterdir()] == ["profile.json"]


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write_profile(profile_named("h100:llama-8b"), tmp_path / "taken")
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]


def changed(path: Path, keys: list[str], value: Any) -> None:
    table = json.loads(path.read_text())
    inner = table
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    path.write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("keys", "value", "expected"),
    [
        (["step", "constant"], -1.0, "$.step.constant"),
        (["step", "constant"], "fast", "$.step.constant"),
        (["step", "per_row"], None, "per_row"),
        (["step", "per_raw"], 1.0, "per_raw"),
        (["step", "by_tokens", "seconds"], [1.0], "one per count"),
        (["step", "by_sampled_rows"], {"counts": [0, 1], "seconds": [2, 1]}, "seconds decrease"),
        (["step", "by_sampled_rows"], {"counts": [1, 1], "seconds": [1, 2]}, "counts decrease"),
        (["store_read", "bandwidth"], 0, "bandwidth"),
        (["limits", "max_num_seqs"], 0, "max_num_seqs is 0"),
        (["limits", "max_num_seq"], 4, "max_num_seq"),
        (["error"], [{"kind": "decode", "steps": 3, "mean": 0.1, "p99": 0.2}], "calculated"),
        (["origin"], "guessed", "guessed"),
        (["fdcore_profile"], 99, "version 99"),
    ],
)
def test_invalid_value_is_rejected_by_name(path: Path, keys: list[str], value: Any, expected: str) -> None:
    changed(path, keys, value)
    with pytest.raises(ConfigError) as raised:
        read_profile(path)
    assert expected in str(raised.value)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"fdcore_profile": 1}', b"[" * 100_000])
def test_unrelated_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "strange.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a profile"):
        read_profile(path)


def test_oversized_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    path.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_profile(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json"):
        read_profile(tmp_path / "none.json")
