"""Profiles by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from fd_core.errors import ConfigError
from fd_core.simulation.costs.naming import calibrated_folder, packaged_profiles, profile_named
from fd_core.simulation.costs.profile import write_profile


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "unknown profile"),
        ("h100", "h100:llama-70b:tp=8"),
        ("h10:llama-8b", "did you mean h100"),
        ("h100:llama8b", "did you mean llama-8b"),
        ("h100:", "known: llama-8b"),
        ("h100:llama-8b:tp=3", "tp may be 1, 2, 4, 8"),
        ("h100:llama-8b:tp=zero", "expected tp from"),
        ("h100:llama-8b:bandwidth=2", "from 0.01 to 1"),
        ("h100:llama-8b:bandwidth=nan", "from 0.01 to 1"),
        ("h100:llama-8b:kv=int4", "expected kv of bf16 or fp8 or int8"),
        ("h100:llama-8b:pp=2", "pipeline parallel sizes are not calculated"),
        ("h100:llama-8b:width=1", "valid options: tp, kv, bandwidth"),
        ("h100:llama-70b", "use tp=4"),
        ("zen4-2c:llama-70b", "use a device with more memory"),
        ("no/such.json", "cannot read"),
    ],
)
def test_unknown_profile_name_lists_alternatives(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        profile_named(text)
    assert expected in str(raised.value)
    assert raised.value.field == "PROFILE"


def test_profile_path_is_read(tmp_path: Path) -> None:
    write_profile(profile_named("h100:llama-8b"), tmp_path / "mine.json")
    assert profile_named(str(tmp_path / "mine.json")).name == "h100:llama-8b"


def test_local_calibration_is_found_by_name() -> None:
    write_profile(profile_named("h100:llama-8b"), calibrated_folder() / "own.json")
    assert profile_named("own").name == "h100:llama-8b"
    with pytest.raises(ConfigError, match="measured: own"):
        profile_named("others")


@pytest.mark.parametrize("name", packaged_profiles())
def test_packaged_profiles_are_measured_with_accuracy(name: str) -> None:
    profile = profile_named(name)
    assert profile.label == f"{name} (measured)"
    assert {error.kind for error in profile.error} >= {"decode", "prefill", "mixed"}
