"""Several workers as one service in every kind of trouble; `nox -s soak` does the same with 10,000 requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.service import SMALL, endure

CAST = ("prefill", "decode", "mixed") * 2


@pytest.mark.slow
def test_a_service_endures_whatever_befalls_its_workers(tmp_path: Path) -> None:
    endure(tmp_path, SMALL, CAST, seed=1)
