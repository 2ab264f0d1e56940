"""Days of work that kits compare: what they contain, and that their accounts notice each kind of difference."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fd_core.testing.kit.days.account import Day, DayAccount, account_of, require_as_good
from fd_core.testing.kit.days.work import talks
from fd_core.testing.kit.law import InvariantViolated
from fd_core.testing.kit.privacy import created_paths
from fd_core.types import RequestSpec, SamplingParams

_ELSEWHERE = {
    "delivered": "engines that died",
    "images": "models with encoders",
    "prefill_at": "pairs of workers",
    "prefill_job": "pairs of workers",
    "traceparent": "traces change nothing",
}
_SECRET = b"a word of a prompt"


def _day(each: Callable[[int], object] = lambda _: None, cost: float = 1.0) -> Day:
    def live() -> Generator[None, None, Mapping[str, float]]:
        for hour in range(6):
            for number in range(1000):
                each(1000 * hour + number)
            yield
        return {"pauses": cost}

    return live


_END = threading.Event()
_KEPT: list[bytes] = []


def _keep_for_an_hour(number: int) -> None:
    if number == 2500:
        _KEPT.append(bytes(300_000))
    if number == 2999:
        _KEPT.clear()


def _keep(_: int) -> None:
    _KEPT.append(bytes(40))


def _log(number: int) -> None:
    logging.getLogger("x").debug("%s %d", _SECRET.decode(), number)


def _log_each(number: int) -> None:
    logging.getLogger("x").info("call %d", number)


def _forget(number: int) -> None:
    if number == 0:
        threading.Thread(target=_END.wait, daemon=True).start()


_WRONG: dict[str, Day] = {
    "more pauses": _day(cost=2.0),
    "more memory for an hour": _day(_keep_for_an_hour),
    "memory of each call": _day(_keep),
    "a secret in a log": _day(_log),
    "a line for each call": _day(_log_each),
    "a thread": _day(_forget),
}


@cache
def _specs() -> list[Any]:
    return [turn.spec for talk in talks(300) for turn in talk.turns]


@pytest.mark.parametrize("field", [*RequestSpec.__struct_fields__, *SamplingParams.__struct_fields__])
def test_requests_of_a_day_vary_in_every_field(field: str) -> None:
    owners = _specs() if field in RequestSpec.__struct_fields__ else [spec.params for spec in _specs()]
    values = {msgspec.json.encode(getattr(owner, field)) for owner in owners}
    assert (len(values) < 2) == (field in _ELSEWHERE), f"{field}: {values}"


@pytest.fixture(scope="module")
def right() -> DayAccount:
    account = account_of(_day(), _SECRET)
    require_as_good(account_of(_day(), _SECRET), account, "the same day", "8", 1.5)
    return account


@pytest.mark.parametrize("what", _WRONG)
def test_account_notices(what: str, right: DayAccount) -> None:
    _END.clear()
    try:
        with pytest.raises(InvariantViolated):
            require_as_good(account_of(_WRONG[what], _SECRET), right, what, "8", 1.5)
    finally:
        _END.set()
        _KEPT.clear()


def test_lines_for_debugging_are_no_memory_of_a_day(right: DayAccount) -> None:
    account = account_of(_day(lambda number: logging.getLogger("x").debug("call %d", number)), _SECRET)
    require_as_good(account, right, "a day with a log", "8", 1.5)


def test_names_of_created_files_are_not_interned(tmp_path: Path) -> None:
    """The table of interned strings grows by megabytes at any name, which would count as memory of a plugin."""
    name = secrets.token_hex()
    with created_paths() as made:
        os.close(os.open(f"{tmp_path}/{name}", os.O_CREAT))
    again = name[:1] + name[1:]
    assert sys.intern(again) is again
    assert [*made] == [tmp_path / name]
