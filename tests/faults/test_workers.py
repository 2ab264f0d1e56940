"""Several workers as one service in trouble; `nox -s soak` does the same in every kind, and with 10,000 requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.service import SMALL, Scale, endure

PAIRS = ("prefill", "decode") * 2
SMALLER = replace(SMALL, requests=300, prompts=24, kinds=("kill",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "cast"),
    [
        pytest.param(SMALLER, (*PAIRS, "mixed"), id="short"),
        pytest.param(SMALL, (*PAIRS, "mixed", "mixed"), id="long", marks=pytest.mark.soak),
    ],
)
def test_a_service_endures_whatever_befalls_its_workers(tmp_path: Path, scale: Scale, cast: tuple[str, ...]) -> None:
    endure(tmp_path, scale, cast, seed=1)
