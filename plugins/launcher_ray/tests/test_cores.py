"""Processors reserved for one process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from fd_launcher_ray.cores import ReservedCores


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6})


def test_no_processor_is_assigned_twice() -> None:
    first, second = ReservedCores(2), ReservedCores(1)
    assert (first.numbers, second.numbers) == ([4, 5], [6])
    first.close()
    assert ReservedCores(1).numbers == [4]


def test_too_few_processors_assign_none() -> None:
    first = ReservedCores(2)
    assert ReservedCores(2).numbers == []
    assert ReservedCores(1).numbers == [6], "the failed reservation freed its processors"
    assert first.numbers == [4, 5]


def test_no_processors_assign_none() -> None:
    assert ReservedCores(0).numbers == []
