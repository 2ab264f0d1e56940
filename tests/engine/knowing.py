"""The kit's drafter, told the golden texts of the null backend."""

from __future__ import annotations

from fd_core.testing.stepping import drafting
from fd_core.types import RequestSpec
from tests.engine.helpers import golden


class KnowingDrafter(drafting.KnowingDrafter):
    """Guesses from the golden texts, wrong in a share of its tokens."""

    def __init__(self, num_slots: int, specs: list[RequestSpec], wrong: float, seed: int) -> None:
        texts = golden(specs)
        super().__init__(num_slots, [[*spec.prompt, *texts[spec.request_id]] for spec in specs], wrong, seed)
