"""What every connector does with the buffers of a value."""

from __future__ import annotations

from collections.abc import Sequence

from fd_core.disagg.connectors.contract import Bytes, ConnectorError

__all__ = ["flat_parts"]


def flat_parts(parts: Sequence[Bytes], value_bytes: int) -> tuple[list[memoryview], int]:
    """Return the parts as uint8[n] views, and their total length. Raises `ConnectorError` over `value_bytes`."""
    flat = [memoryview(part).cast("B") for part in parts]
    length = sum(map(len, flat))
    if length > value_bytes:
        raise ConnectorError(f"a value of {length:,} bytes is longer than the {value_bytes:,} that were agreed on")
    return flat, length
