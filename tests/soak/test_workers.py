"""Several workers as one service, as real processes with real faults: nothing is lost, repeated or leaked.

Part of `nox -s soak`. A failure prints the seed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.soak.service import NULL, SMOLLM2, Scale, run_service

pytestmark = pytest.mark.soak

SEED = int(os.environ.get("FD_SOAK_SEED", "20261121"))
CAST = ("prefill", "decode", "mixed") * 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scale", [NULL, SMOLLM2], ids=lambda scale: scale.model)
def test_service_survives_worker_faults(tmp_path: Path, scale: Scale) -> None:
    run_service(tmp_path, scale, CAST, SEED)
