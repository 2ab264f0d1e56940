"""Names that were replaced work, warn once, and go when their last version has come."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

import fd_core
from fd_core import deprecations
from fd_core.cli.settings import OLDER_SWITCHES, merge
from fd_core.deprecations import KEPT_MINOR_VERSIONS, OldName, OldNameWarning, replaced, warn_once

OLD = OldName("FD_OLD", "set FD_NEW", since="0.1", until="0.4")
OLD_NAMES = [switch.old for switch in OLDER_SWITCHES]


def minor(version: str) -> tuple[int, int]:
    first, second = version.split(".")[:2]
    return int(first), int(second)


@pytest.fixture(autouse=True)
def nobody_was_told(monkeypatch):
    monkeypatch.setattr(deprecations, "_told", set())


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


@pytest.mark.parametrize("old", OLD_NAMES, ids=lambda old: old.name)
def test_an_old_name_goes_when_its_time_has_come(old):
    (first, second), (last, end) = minor(old.since), minor(old.until)
    assert last > first or end > second + KEPT_MINOR_VERSIONS, "it works in two minor versions after it was replaced"
    assert minor(fd_core.__version__) < minor(old.until), f"take {old.name} out, and say so in CHANGELOG.md"


def test_the_switches_of_fastdeploy_work_and_say_what_to_use():
    with pytest.warns(OldNameWarning, match="set FD_OUTPUT_TRANSPORT to memory or zmq"):
        assert merge("m", {}, {"FD_USE_GET_SAVE_OUTPUT_V1": "1"}).engine.output_transport == "zmq"
    with pytest.warns(OldNameWarning, match="set FD_SAVE_PREEMPTED_KV"):
        assert not merge("m", {}, {"FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST": "0"}).engine.save_preempted_kv


def test_whoever_uses_the_new_name_is_not_warned():
    with warnings.catch_warnings(action="error"):
        merge("m", {}, {"FD_OUTPUT_TRANSPORT": "zmq"})


def test_the_command_line_tells_it_in_one_line():
    command = (sys.executable, "-m", "fd_core.cli", "serve", "no-such-model", "--backend", "reference")
    done = subprocess.run(command, env={"FD_USE_GET_SAVE_OUTPUT_V1": "1"}, capture_output=True, text=True, timeout=60)
    told = [line for line in done.stderr.splitlines() if "FD_USE_GET_SAVE_OUTPUT_V1" in line]
    assert len(told) == 1 and told[0].startswith("fdcore: FD_USE_GET_SAVE_OUTPUT_V1 was replaced in fd_core 0.1"), (
        done.stderr
    )
    assert "OldNameWarning" not in done.stderr
