"""How the decode side says where to write. It travels with the sealed message that opens the lease, and only there."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Final

import msgspec
from fd_core.disagg.connectors.contract import MAX_ADDRESS_BYTES, ConnectorError

from fd_connector_nixl.layout import TOKEN_BYTES

__all__ = ["Address", "read_address", "write_address"]

_DIGEST_BYTES: Final = 16


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the memory of a lease is."""

    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    """What the memory begins with."""
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """The decode side's agent."""
    start: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    """Where the memory is, in the decode side's process."""
    size: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    metadata: bytes
    """What NIXL has to know of that agent and this memory, and of no other."""


def write_address(lease: str, address: Address) -> bytes:
    """Return what travels as `Open.address`. Raises `ConnectorError` if it would be too long."""
    encoded = msgspec.msgpack.encode(address)
    encoded = _digest(lease, encoded) + encoded
    if len(encoded) > MAX_ADDRESS_BYTES:
        raise ConnectorError(
            f"what NIXL says about this worker takes {len(encoded):,} bytes, which is over {MAX_ADDRESS_BYTES:,}",
            hint="name fewer devices in FD_NIXL_NET_DEVICES",
        )
    return encoded


def read_address(lease: str, encoded: bytes) -> Address:
    """Read what travelled. Raises `ConnectorError`.

    The digest is no proof of who wrote it, which is the seal's business. It keeps what was damaged, and the address of
    another lease, from NIXL, which believes what it is given.
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
