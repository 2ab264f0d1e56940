"""The connector kit: the cases that every connector passes. A plugin derives a class and names its connector.

    class TestMyConnector(ConnectorSuite):
        connector = "mine"

`docs/extend/write-a-connector.md` shows a whole plugin.
"""

import pytest

pytest.register_assert_rewrite("fd_core.testing.connectors.suite")

from fd_core.testing.connectors.suite import ConnectorSuite  # noqa: E402 -- after the call above
from fd_core.testing.kit.requirements import OPEN, Requirement, closed  # noqa: E402 -- after the call above

__all__ = ["OPEN", "ConnectorSuite", "Requirement", "closed"]
