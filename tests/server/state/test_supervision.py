"""Background tasks: a failure is logged, counted, visible and retried; one task does not mask another."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest

from fd_core.errors import ConfigError
from fd_core.http.supervision import Supervisor, failure_reason
from tests.server.batches import virtual_time


def test_failed_task_is_logged_counted_shown_and_restarted(caplog: pytest.LogCaptureFixture) -> None:
    starts: list[float] = []

    async def work() -> None:
        starts.append(asyncio.get_running_loop().time())
        if len(starts) <= 10:
            raise OSError(28, "No space left on device", "/secret/path")
        await asyncio.sleep(1000)

    async def check() -> None:
        supervisor = Supervisor()
        supervisor.start("files", work)
        await asyncio.sleep(100)
        assert supervisor.failing == "background task files: no space left on device"
        await asyncio.sleep(300)
        assert (supervisor.failing, supervisor.stats.failures) == ("", {"files": 10})
        await supervisor.close()

    with caplog.at_level(logging.ERROR):
        virtual_time.run(check())
    pauses = [after - before for before, after in itertools.pairwise(starts)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert len(caplog.messages) == 10 and "no space left on device; it restarts in 0.5 s" in caplog.messages[0]


def test_unexpected_error_is_logged_by_location_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise ValueError(" ".join(("a", "prompt")))

    async def check() -> None:
        supervisor = Supervisor()
        await supervisor.start("once", work, repeat=False)
        assert supervisor.failing == "background task once: ValueError"
        await supervisor.start("once", lambda: asyncio.sleep(0), repeat=False)
        assert supervisor.failing == ""

    virtual_time.run(check())
    assert "test_supervision.py" in caplog.text and "a prompt" not in caplog.text


def test_parts_of_a_task_fail_independently() -> None:
    async def fail() -> None:
        raise ConfigError("b is wrong")

    async def check() -> None:
        supervisor = Supervisor()
        supervisor.start("check", fail, part="b", repeat=False)
        await supervisor.start("check", lambda: asyncio.sleep(1), part="a", repeat=False)
        assert supervisor.failing == "background task check: b is wrong"
        supervisor.keep("check", {"a"})
        assert supervisor.failing == ""

    virtual_time.run(check())


def test_cancelled_task_is_not_a_failure() -> None:
    async def check() -> None:
        supervisor = Supervisor()
        task = supervisor.start("sleep", lambda: asyncio.sleep(1000))
        await asyncio.sleep(1)
        await supervisor.close()
        assert task.cancelled() and supervisor.stats.failures == {"sleep": 0}

    virtual_time.run(check())


def test_reasons_name_no_paths() -> None:
    assert failure_reason(OSError(28, "No space left on device", "/secret")) == "no space left on device"
