"""The store kit: every KV store runs it by naming its location and a back door.

    class TestMyStore(StoreSuite):
        @pytest.fixture
        def location(self, tmp_path): return f"mystore:{tmp_path}"

        @pytest.fixture
        def back_door(self, tmp_path): return MyDoor(tmp_path)

`docs/extend/write-a-store.md` shows a whole plugin.
"""

import pytest

pytest.register_assert_rewrite("fd_core.testing.stores.suite")

from fd_core.testing.kit.requirements import OPEN, Requirement, closed, lacks  # noqa: E402 -- after the call above
from fd_core.testing.stores.suite import BackDoor, StoreSuite  # noqa: E402 -- after the call above

__all__ = ["OPEN", "BackDoor", "Requirement", "StoreSuite", "closed", "lacks"]
