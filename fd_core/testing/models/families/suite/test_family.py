"""The family and the backends that the options name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fd_core.testing.kit.plugin import chosen
from fd_core.testing.models.families import FamilySuite, FamilyTarget, find_family


class TestFamily(FamilySuite):
    """All tests."""

    def targets(self, config: pytest.Config) -> Sequence[FamilyTarget]:
        self.backends = config.getoption("--fd-backend")
        names: list[str] = config.getoption("--fd-model-family")
        if not names:
            raise pytest.UsageError("name the model family to test: --fd-model-family=NAME")
        return [chosen(name, lambda name: find_family(name, config.getoption("--fd-seed"))) for name in names]
