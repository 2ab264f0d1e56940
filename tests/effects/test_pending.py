"""A pending operation completes once, in time, and never while one of its blocks is being copied."""

from __future__ import annotations

import pytest

from fd_core.effects.operations import Completion, Found, Loaded, Saved
from fd_core.effects.pending import PendingOperations


class Pending(PendingOperations[Completion]):
    def __init__(self) -> None:
        self.completed: list[Completion] = []
        super().__init__(self.completed.append)


@pytest.fixture
def pending() -> Pending:
    return Pending()


def test_first_completion_counts(pending) -> None:
    pending.begin(Found(1, 0, 0))
    assert 1 in pending and len(pending) == 1
    assert pending.finish(Found(1, 1, 2))
    assert not pending.finish(Found(1, 2, 2))
    assert not pending.end(1)
    assert not pending.advance(Found(1, 2, 2))
    assert not pending.begin_copy(1)
    assert pending.completed == [Found(1, 1, 2)]
    assert 1 not in pending and len(pending) == 0


def test_duplicate_operation_number_is_rejected(pending) -> None:
    pending.begin(Loaded(1, 0))
    with pytest.raises(ValueError, match="operation 1 is pending"):
        pending.begin(Saved(1, 0))


def test_unknown_operations_are_ignored(pending) -> None:
    assert not pending.end(7)
    assert not pending.finish(Saved(7, 0))
    assert pending.completed == []


def test_ended_operation_completes_with_partial_result(pending) -> None:
    pending.begin(Saved(1, 0))
    assert pending.advance(Saved(1, 3))
    assert pending.end(1)
    assert pending.completed == [Saved(1, 3)]


def test_expired_operations_are_returned_once(pending) -> None:
    pending.begin(Loaded(1, 0), 101.0)
    pending.begin(Found(2, 0, 0), 100.5)
    pending.begin(Saved(3, 0))
    pending.advance(Found(2, 4, 4))
    assert pending.expire(100.4) == []
    assert pending.expire(100.5) == [Found(2, 4, 4)]
    assert pending.completed == [Found(2, 4, 4)]
    assert pending.expire(101.0) == [Loaded(1, 0)]
    assert pending.expire(1e9) == [] and 3 in pending


def test_completed_operation_does_not_expire(pending) -> None:
    pending.begin(Found(1, 0, 0), 100.0)
    pending.finish(Found(1, 1, 1))
    assert pending.expire(101.0) == []
    assert pending.completed == [Found(1, 1, 1)]


def test_operation_ended_during_copy_completes_after_it(pending) -> None:
    pending.begin(Loaded(1, 0), 100.0)
    assert pending.begin_copy(1)
    assert pending.expire(100.0) == [Loaded(1, 0)]
    assert pending.expire(100.0) == []
    assert not pending.end(1) and 1 not in pending
    assert pending.completed == [] and len(pending) == 1
    pending.end_copy(1, Loaded(1, 1))
    assert pending.completed == [Loaded(1, 1)] and len(pending) == 0
    assert not pending.begin_copy(1)


def test_operation_finished_during_copy_keeps_completion(pending) -> None:
    pending.begin(Loaded(1, 0))
    assert pending.begin_copy(1)
    assert pending.finish(Loaded(1, 0, seconds=3.0))
    assert pending.completed == []
    pending.end_copy(1, Loaded(1, 5))
    assert pending.completed == [Loaded(1, 0, seconds=3.0)]


def test_failed_copy_does_not_count(pending) -> None:
    pending.begin(Saved(1, 0))
    assert pending.begin_copy(1)
    pending.end_copy(1)
    pending.end(1)
    assert pending.completed == [Saved(1, 0)]


def test_copy_does_not_block_other_operations(pending) -> None:
    pending.begin(Saved(1, 0))
    pending.begin(Saved(2, 0))
    pending.begin_copy(1)
    assert pending.end(1) and pending.end(2)
    assert pending.completed == [Saved(2, 0)]
    pending.end_copy(1)
    assert pending.completed == [Saved(2, 0), Saved(1, 0)]


def test_operations_are_identified_by_number_and_kind(pending) -> None:
    for answer in (Saved(3, 0), Found(1, 0, 0), Loaded(2, 0)):
        pending.begin(answer)
    assert pending.numbers() == [1, 2, 3]
    assert pending.numbers(Saved, Loaded) == [2, 3]
    pending.begin_copy(3)
    pending.end(3)
    assert pending.numbers() == [1, 2] and pending.numbers(Saved) == []
