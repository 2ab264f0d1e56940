"""Any call that changes a file may fail or be the last one: everything acknowledged stays true."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path

import pytest

from tests.server.batches.world import World, run_world

SEEDS = range(20)
SMALL = 6
"""Seed of a world with uploads, batches and a cancellation in few calls."""


def test_nothing_acknowledged_is_lost_in_hostile_worlds() -> None:
    occurred = Counter[str]()
    for seed in SEEDS:
        try:
            occurred += run_world(seed)
        except BaseException:
            print(f"again: python -m tests.server.batches.world --first {seed} --worlds 1")
            raise
    missing = {"kill", "delete", "cancel cancelling", "completed", "failed", "cancelled", "_upload 503"} - {*occurred}
    assert not missing


@pytest.mark.parametrize("error", [None, errno.ENOSPC], ids=["kill", "full"])
def test_any_call_of_a_world_may_fail(tmp_path: Path, error: int | None) -> None:
    sound = World(tmp_path / "sound", SMALL)
    sound.run()
    assert sound.occurred["completed"] and sound.fault.calls > 20
    for call in range(sound.fault.calls):
        print(f"fault at call {call}")
        world = World(tmp_path / str(call), SMALL, call, 1, error)
        world.run()
        assert error is not None or world.occurred["kill"]
