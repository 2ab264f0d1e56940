"""The address by which the decode side says where to write; it travels only in the sealed `Open` of a lease."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Final

import msgspec
from fd_core.disagg.connectors.contract import MAX_ADDRESS_BYTES, ConnectorError

from fd_connector_nixl.layout import TOKEN_BYTES

_DIGEST_BYTES: Final = 16


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Location of the memory of a lease."""

    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    """The first bytes of the memory."""
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """Name of the decode side's agent."""
    start: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    """Start of the memory in the decode side's process."""
    size: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    metadata: bytes
    """What NIXL has to know to reach that agent and this memory, and no other."""


def write_address(lease: str, address: Address) -> bytes:
    """Return the value of `Open.address`. Raises `ConnectorError` if it would be too long."""
    encoded = msgspec.msgpack.encode(address)
    encoded = _digest(lease, encoded) + encoded
    if len(encoded) > MAX_ADDRESS_BYTES:
        raise ConnectorError(
            f"what NIXL says about this worker takes {len(encoded):,} bytes, which is over {MAX_ADDRESS_BYTES:,}",
            hint="name fewer devices in FD_NIXL_NET_DEVICES",
        )
    return encoded


def read_address(lease: str, encoded: bytes) -> Address:
    """Read an `Open.address`. Raises `ConnectorError`.

    The digest is no proof of who wrote the address, which is the seal's business. It keeps damaged addresses, and those
    of other leases, from NIXL, which checks nothing.
    """
    if len(encoded) > MAX_ADDRESS_BYTES:
        raise ConnectorError("the address for NIXL is too long")
    digest, rest = encoded[:_DIGEST_BYTES], encoded[_DIGEST_BYTES:]
    if digest != _digest(lease, rest):
        raise ConnectorError("the address for NIXL is damaged, or another lease's")
    try:
        return msgspec.msgpack.decode(rest, type=Address)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConnectorError("the address for NIXL cannot be read") from error


def _digest(lease: str, encoded: bytes) -> bytes:
    named = len(lease.encode()).to_bytes(4, "little") + lease.encode() + encoded
    return blake2b(named, digest_size=_DIGEST_BYTES, person=b"fd_core nixl").digest()
