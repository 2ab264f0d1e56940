"""The connector kit: derive a class and name the connector, see docs/extend/write-a-connector.md."""

import pytest

from fd_core.testing.kit.requirements import OPEN, Requirement, closed, require_packages

pytest.register_assert_rewrite("fd_core.testing.connectors.suite")
require_packages()

from fd_core.testing.connectors.suite import ConnectorSuite  # noqa: E402 -- after the calls above

__all__ = ["OPEN", "ConnectorSuite", "Requirement", "closed"]
