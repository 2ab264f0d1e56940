"""An operation is answered once, in time, and never while one of its blocks is being copied."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.kv.effects import Found, Load, Loaded, Lookup, Save, Saved
from fd_core.kv.tiers.operations import Operations

from .scripted import Clock

BLOCKS = np.arange(2, dtype=np.int32)
KEYS = (b"a", b"b")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def operations(clock) -> Operations:
    return Operations(clock)


def test_a_finished_operation_is_answered_once(operations) -> None:
    operation = operations.begin(Lookup(1, KEYS), 1.0)
    operation.host, operation.total = 1, 2
    assert operations.finish(operation)
    assert not operations.finish(operation)
    operations.cancel(1)
    assert operations.collect() == [Found(1, 1, 2)]
    assert operations.collect() == [] and len(operations) == 0


def test_operations_expire_at_their_deadline_and_are_returned_once(operations, clock) -> None:
    operations.begin(Load(1, KEYS, BLOCKS), 1.0)
    operations.begin(Lookup(2, KEYS), 0.5)
    clock.now += 0.5
    assert [operation.effect.operation for operation in operations.expire()] == [2]
    assert operations.collect() == [Found(2, 0, 0)]
    clock.now += 0.5
    assert [operation.effect.operation for operation in operations.expire()] == [1]
    assert operations.collect() == [Loaded(1, 0)]
    assert operations.expire() == []


def test_an_operation_that_ends_during_a_copy_is_answered_after_it(operations, clock) -> None:
    operation = operations.begin(Load(1, KEYS, BLOCKS), 1.0)
    assert operations.begin_copy(operation)
    clock.now += 1.5
    assert len(operations.expire()) == 1
    assert operations.expire() == [] and operations.collect() == []
    operations.end_copy(operation, whole=True, from_host=True)
    assert operations.collect() == [Loaded(1, 1, 1, 1.5)]
    assert not operations.begin_copy(operation)


def test_a_copy_that_failed_does_not_count(operations) -> None:
    operation = operations.begin(Save(1, KEYS, BLOCKS, True), 1.0)
    assert operations.begin_copy(operation)
    operations.end_copy(operation, whole=False)
    assert operations.skip_copy(operation)
    operations.finish(operation)
    assert not operations.skip_copy(operation)
    assert operations.collect() == [Saved(1, 1)]


def test_cancel_hurries_the_answer_and_knows_no_strangers(operations) -> None:
    operations.begin(Save(1, KEYS, BLOCKS, True), 1.0)
    operations.cancel(7)
    assert operations.collect() == [] and operations.open_saves == 1
    operations.cancel(1)
    operations.cancel(1)
    assert operations.collect() == [Saved(1, 0)] and operations.open_saves == 0


def test_all_but_saves_end_together(operations) -> None:
    operations.begin(Save(1, KEYS, BLOCKS, True), 1.0)
    operations.begin(Load(2, KEYS, BLOCKS), 1.0)
    operations.end_all(saves=False)
    assert operations.collect() == [Loaded(2, 0)]
    operations.end_all(saves=True)
    assert operations.collect() == [Saved(1, 0)]


def test_waiting_ends_with_an_answer_a_deadline_or_the_time(operations, clock) -> None:
    operations.wait(0.01)
    operations.begin(Lookup(1, KEYS), 0.01)
    operations.wait(60.0)  # until the deadline
    operations.answer(Found(2, 0, 0))
    operations.wait(60.0)
    assert operations.collect() == [Found(2, 0, 0)]
