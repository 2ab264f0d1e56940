"""`fdcore calibrate`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fd_core.cli.app import app
from fd_core.errors import FdError
from fd_core.simulation.costs.calculating import ASSUMED_REQUEST
from fd_core.simulation.costs.naming import profile_named

SMALL = ("--backend", "null", "--max-model-len", "128", "--max-num-seqs", "2", "--max-num-batched-tokens", "16")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_CACHE", str(tmp_path / "cache"))


def run(*arguments: str, spread: str = "10") -> Result:
    return CliRunner().invoke(app, ["calibrate", "x", *SMALL, "--seconds", "0.1", "--max-spread", spread, *arguments])


def test_profile_is_found_by_its_name() -> None:
    done = run()
    assert done.exit_code == 0, done.output
    assert "Mean error" in done.output and "mixed" in done.output
    profile = profile_named("x-null")
    assert profile.label == "x-null (measured)"
    assert any("over HTTP" in note for note in profile.notes)
    assert all(link.source.startswith("measured") for link in (profile.transfer, profile.store_read))


@pytest.mark.timing
def test_request_costs_more_than_token_delivery() -> None:
    assert run().exit_code == 0
    request = profile_named("x-null").request
    assert 0 < request.delivery < request.receive < 1


def test_profile_lists_unmeasured_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise FdError("no server here")

    monkeypatch.setattr("fd_core.cli.planning.measured_server.serving_times", fails)
    done = run("-o", str(tmp_path / "mine.json"), "--name", "mine")
    assert done.exit_code == 0, done.output
    profile = profile_named(str(tmp_path / "mine.json"))
    assert profile.name == "mine"
    assert any("no server here" in note for note in profile.notes)
    assert profile.request.receive == ASSUMED_REQUEST.receive


def test_noisy_machine_writes_no_profile(tmp_path: Path) -> None:
    done = run("-o", str(tmp_path / "mine.json"), spread="0.01")
    assert done.exit_code == 1
    assert "varied by" in done.output
    assert not (tmp_path / "mine.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "no/such/folder/mine.json"), "does not exist"),
        (("-o", "."), "it is a folder"),
        (("--name", "../mine"), "is not a valid profile name"),
        (("--role", "decode"), "is not measured"),
        (("--max-num-seqs", "none"), "--max-num-seqs"),
    ],
)
def test_bad_arguments_fail_before_measuring(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output.replace("\n", " ")
