"""Sizes in bytes in human-readable form."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS: Final = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return bytes: a number with K, M, G, T (powers of 1000) or Ki, Mi, Gi, Ti (of 1024). Raises `ValueError`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a size such as 256M, 1.5G or 512Mi, got {text!r}")
    wanted = float(match[1]) * (_UNITS | _BINARY_UNITS)[(match[2] or "").lower()]
    if not 1 <= wanted < 2**63:
        raise ValueError(f"{text!r} is not a valid size above 0")
    return int(wanted)


def format_size(count: int) -> str:
    """Return `count` bytes in the largest binary unit that leaves at least one, such as `1.5 GiB`."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
