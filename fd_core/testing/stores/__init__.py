"""The store kit: derive a class with a location and a back door, see docs/extend/write-a-store.md."""

import pytest

pytest.register_assert_rewrite("fd_core.testing.stores.suite")

from fd_core.testing.kit.requirements import OPEN, Requirement, closed, lacks  # noqa: E402 -- after the call above
from fd_core.testing.stores.suite import BackDoor, StoreSuite  # noqa: E402 -- after the call above

__all__ = ["OPEN", "BackDoor", "Requirement", "StoreSuite", "closed", "lacks"]
