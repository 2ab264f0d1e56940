"""Encoding of the address that the decode side sends to the prefill side."""

from __future__ import annotations

import msgspec
import pytest
from fd_core.disagg.connectors.contract import MAX_ADDRESS_BYTES, ConnectorError
from hypothesis import given
from hypothesis import strategies as st

from fd_connector_nixl.layout import Address, read_address, write_address

ADDRESS = Address(b"t" * 16, "fd_core-1", 4096, 65536, b"metadata")


def test_address_round_trips() -> None:
    assert read_address("lease", write_address("lease", ADDRESS)) == ADDRESS


def test_address_is_valid_for_one_lease() -> None:
    with pytest.raises(ConnectorError, match="another lease"):
        read_address("lease2", write_address("lease", ADDRESS))


@given(st.integers(0, 60), st.integers(1, 255))
def test_changed_byte_is_detected(at: int, change: int) -> None:
    written = bytearray(write_address("lease", ADDRESS))
    written[at % len(written)] ^= change
    with pytest.raises(ConnectorError):
        read_address("lease", bytes(written))


@given(st.binary(max_size=5000))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(ConnectorError):
        read_address("lease", garbage)


def test_oversized_address_is_not_sent() -> None:
    long = msgspec.structs.replace(ADDRESS, metadata=bytes(MAX_ADDRESS_BYTES))
    with pytest.raises(ConnectorError, match="FD_NIXL_NET_DEVICES"):
        write_address("lease", long)
