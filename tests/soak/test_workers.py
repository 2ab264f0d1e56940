"""Several workers as one service, as real processes in real trouble: nothing is lost, said twice or left behind.

Part of `nox -s soak`. A failure prints the seed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.soak.service import NULL, SMOLLM2, Scale, endure

pytestmark = pytest.mark.soak

SEED = int(os.environ.get("FD_SOAK_SEED", "20261121"))
CAST = ("prefill", "decode", "mixed") * 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scale", [NULL, SMOLLM2], ids=lambda scale: scale.model)
def test_a_service_endures_whatever_befalls_its_workers(tmp_path: Path, scale: Scale) -> None:
    endure(tmp_path, scale, CAST, SEED)
