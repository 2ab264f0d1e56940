"""Exactly one answer, and none while a block is touched."""

from __future__ import annotations

import threading
import time

import pytest

from fd_core.disagg.answers import Answers


def opened(*numbers: int) -> Answers[str]:
    answers: Answers[str] = Answers()
    for number in numbers:
        answers.begin(number)
    return answers


def test_the_first_answer_counts() -> None:
    answers = opened(1)
    assert answers.give(1, "first")
    assert not answers.give(1, "second")
    assert not answers.give(2, "nobody asked")
    assert answers.collect() == ["first"]
    assert answers.collect() == []
    assert len(answers) == 0


def test_a_number_is_open_once() -> None:
    with pytest.raises(ValueError, match="operation 1 is in progress"):
        opened(1).begin(1)


def test_an_answer_waits_for_the_copy_that_is_under_way() -> None:
    answers = opened(1, 2)
    assert answers.begin_copy(1)
    assert answers.give(1, "over")
    assert answers.give(2, "other")
    assert not answers.give(1, "again")
    assert answers.collect() == ["other"]
    answers.end_copy()
    assert answers.collect() == ["over"]
    assert not answers.begin_copy(1)


def test_the_rest_is_answered_but_for_the_copy_that_is_under_way() -> None:
    answers = opened(1, 2, 3)
    answers.give(2, "2")
    answers.begin_copy(3)
    assert answers.give_rest(str) == ["1", "3"]
    assert answers.collect() == ["2", "1"]
    answers.end_copy()
    assert answers.collect() == ["3"]


def test_waiting_ends_with_an_answer() -> None:
    answers = opened(1)
    threading.Timer(0.05, lambda: answers.give(1, "late")).start()
    began = time.monotonic()
    answers.wait(20)
    assert time.monotonic() - began < 10
    assert answers.collect() == ["late"]
    began = time.monotonic()
    answers.wait(0.05)
    assert time.monotonic() - began >= 0.04
