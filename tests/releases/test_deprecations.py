"""Names that were replaced work, warn once, and go when their last version has come."""

from __future__ import annotations

import warnings

import pytest

import fd_core
from fd_core import deprecations
from fd_core.cli.report import show_deprecations
from fd_core.cli.settings.settings import merge
from fd_core.deprecations import KEPT_MINOR_VERSIONS, OLD_NAMES, OldName, OldNameWarning, replaced, warn_once

OLD = OldName("FD_OLD", "set FD_NEW", since="0.1", until="0.4")


def minor(version: str) -> tuple[int, int]:
    first, second = version.split(".")[:2]
    return int(first), int(second)


@pytest.fixture(autouse=True)
def nobody_was_told(monkeypatch):
    monkeypatch.setattr(deprecations, "_warned", set())


def test_an_old_name_warns_once_with_what_to_use():
    with pytest.warns(OldNameWarning, match=r"FD_OLD was replaced in fd_core 0\.1 .* from 0\.4 on: set FD_NEW") as told:
        warn_once(OLD)
        warn_once(OLD)
    assert len(told) == 1 and told[0].filename == __file__


def test_a_replaced_function_works_and_blames_who_calls_it():
    @replaced(OLD)
    def double(number: int) -> int:
        """Double."""
        return 2 * number

    with pytest.warns(OldNameWarning) as told:
        assert double(number=2) == double(2) == 4
    assert len(told) == 1 and told[0].filename == __file__ and double.__doc__ == "Double."


def test_old_names_go_when_their_time_has_come():
    for old in (OLD, *OLD_NAMES):
        (first, second), (last, end) = minor(old.since), minor(old.until)
        assert last > first or end > second + KEPT_MINOR_VERSIONS, "it works in two more versions"
        assert minor(fd_core.__version__) < minor(old.until), f"take {old.name} out, and say so in CHANGELOG.md"


def test_the_switches_of_fastdeploy_work_without_a_warning():
    with warnings.catch_warnings(action="error"):
        assert merge("m", {}, {"FD_USE_GET_SAVE_OUTPUT_V1": "1"}).engine.output_transport == "zmq"
        assert not merge("m", {}, {"FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST": "0"}).engine.save_preempted_kv


def test_the_command_line_tells_it_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        show_deprecations()
        warn_once(OLD)
    told = capsys.readouterr().err
    assert told.startswith("fdcore: FD_OLD was replaced in fd_core 0.1") and told.count("\n") == 1
