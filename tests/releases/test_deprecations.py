"""Replaced names work, warn once, and are removed in the announced version."""

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
def no_warning_so_far(monkeypatch):
    monkeypatch.setattr(deprecations, "_warned", set())


def test_old_name_warns_once_with_its_replacement():
    with pytest.warns(
        OldNameWarning, match=r"FD_OLD was replaced in fd_core 0\.1 .* from 0\.4 on: set FD_NEW"
    ) as warned:
        warn_once(OLD)
        warn_once(OLD)
    assert len(warned) == 1 and warned[0].filename == __file__


def test_replaced_function_works_and_warns_at_the_caller():
    @replaced(OLD)
    def double(number: int) -> int:
        """Double."""
        return 2 * number

    with pytest.warns(OldNameWarning) as warned:
        assert double(number=2) == double(2) == 4
    assert len(warned) == 1 and warned[0].filename == __file__ and double.__doc__ == "Double."


def test_old_names_are_removed_in_their_last_version():
    for old in (OLD, *OLD_NAMES):
        (first, second), (last, end) = minor(old.since), minor(old.until)
        assert last > first or end > second + KEPT_MINOR_VERSIONS, "it works in two more versions"
        assert minor(fd_core.__version__) < minor(old.until), f"remove {old.name}, and list the removal in CHANGELOG.md"


def test_switches_of_fastdeploy_work_without_a_warning():
    with warnings.catch_warnings(action="error"):
        assert merge("m", {}, {"FD_USE_GET_SAVE_OUTPUT_V1": "1"}).engine.output_transport == "zmq"
        assert not merge("m", {}, {"FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST": "0"}).engine.save_preempted_kv


def test_cli_prints_the_warning_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        show_deprecations()
        warn_once(OLD)
    printed = capsys.readouterr().err
    assert printed.startswith("fdcore: FD_OLD was replaced in fd_core 0.1") and printed.count("\n") == 1
