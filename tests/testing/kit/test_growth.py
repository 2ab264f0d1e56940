"""Memory that stays after calls is counted; what pytest itself keeps of them is not."""

from __future__ import annotations

import logging

import pytest

from fd_core.testing.kit.growth import require_bounded
from fd_core.testing.kit.law import InvariantViolated

LOGGER = logging.getLogger(__name__)


def test_records_of_a_log_are_no_memory_of_a_plugin() -> None:
    handlers = list(logging.getLogger().handlers)
    require_bounded(lambda number: LOGGER.warning("value %d is gone", number), 64, "failures")
    assert logging.getLogger().handlers == handlers


def test_each_call_that_leaves_a_record_is_noticed() -> None:
    kept: list[str] = []
    with pytest.raises(InvariantViolated, match="bytes more than after half of them"):
        require_bounded(lambda number: kept.append(f"value {number} is gone"), 64, "failures")
