"""Several workers as one service with faults; `nox -s soak` covers every kind of fault with 10,000 requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.service import SMALL, Scale, run_service

PAIRS = ("prefill", "decode") * 2
SMALLER = replace(SMALL, requests=160, prompts=16, long_tokens=400, kinds=("kill",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "cast"),
    [
        pytest.param(SMALLER, PAIRS, id="short"),
        pytest.param(SMALL, (*PAIRS, "mixed", "mixed"), id="long", marks=pytest.mark.soak),
    ],
)
def test_service_survives_worker_faults(tmp_path: Path, scale: Scale, cast: tuple[str, ...]) -> None:
    run_service(tmp_path, scale, cast, seed=1)
