"""Drafter of the test kit that knows the golden texts of the null backend."""

from __future__ import annotations

from fd_core.testing.models import drafting
from fd_core.types import RequestSpec
from tests.engine.helpers import golden


class OracleDrafter(drafting.OracleDrafter):
    """Drafts from the golden texts, with a given share of wrong tokens."""

    def __init__(self, num_slots: int, specs: list[RequestSpec], wrong: float, seed: int) -> None:
        texts = golden(specs)
        super().__init__(num_slots, [[*spec.prompt, *texts[spec.request_id]] for spec in specs], wrong, seed)
