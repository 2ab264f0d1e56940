"""The connector kit: derive a class and name the connector, see docs/extend/write-a-connector.md."""

import pytest

pytest.register_assert_rewrite("fd_core.testing.connectors.suite")

from fd_core.testing.connectors.suite import ConnectorSuite  # noqa: E402 -- after the call above
from fd_core.testing.kit.requirements import OPEN, Requirement, closed  # noqa: E402 -- after the call above

__all__ = ["OPEN", "ConnectorSuite", "Requirement", "closed"]
