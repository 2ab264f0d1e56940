"""Pool of pages that are never returned to the system."""

from __future__ import annotations

import pytest
from fd_core.disagg.connectors.contract import ConnectorError

from fd_connector_nixl.station import Memory

MIB = 1 << 20


def test_freed_pages_are_reused() -> None:
    memory = Memory()
    slab = memory.lend(MIB - 5, 10 * MIB)
    slab.bytes[:5] = b"hello"
    memory.give_back(slab)
    assert memory.lend(MIB, 10 * MIB) is slab
    assert bytes(slab.bytes[:5]) == b"hello", "it was mapped all the time"
    assert memory.lend(MIB, 10 * MIB) is not slab
    assert memory.taken == 2 * MIB


def test_limit_holds() -> None:
    memory = Memory()
    memory.lend(MIB, 2 * MIB)
    memory.lend(MIB, 2 * MIB)
    with pytest.raises(ConnectorError, match="FD_NIXL_MEMORY_MB"):
        memory.lend(1, 2 * MIB)


def test_small_lease_does_not_get_a_large_piece() -> None:
    memory = Memory()
    large = memory.lend(8 * MIB, 20 * MIB)
    memory.give_back(large)
    assert memory.lend(MIB, 20 * MIB) is not large
    assert memory.lend(5 * MIB, 20 * MIB) is large


def test_small_lease_gets_a_large_piece_at_the_limit() -> None:
    memory = Memory()
    large = memory.lend(8 * MIB, 8 * MIB)
    memory.give_back(large)
    assert memory.lend(MIB, 8 * MIB) is large


def test_exceeding_the_memory_is_a_connector_error() -> None:
    with pytest.raises(ConnectorError):
        Memory().lend(1 << 62, 1 << 63)
