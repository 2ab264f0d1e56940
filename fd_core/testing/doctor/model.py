"""What the doctor finds, as values."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Outcome = Literal["ok", "missing", "wrong", "crash", "hang", "limit"]
"""`missing` raised, `wrong` differs from the oracle, `crash` ended the process, `hang` did not end; `limit` is a limit
that the backend states, or a dtype that it does not offer."""

_SLOW_RATIO: Final = 10.0
_SLOW_SECONDS: Final = 1e-3
"""Below this it is the call that takes the time, not the bytes."""


class OpFinding(msgspec.Struct, frozen=True, kw_only=True, tag="finding"):
    """One operation in one dtype and one size."""

    primitive: str
    case: str = ""
    """What of the operation, such as `gelu`; empty for all of it."""
    dtype: str
    size: str
    outcome: Outcome
    reason: str = ""
    """What was raised or how far off it is; empty if all is well."""
    fell_back: str = ""
    """Why it is known that the host computed it; empty if it is not."""
    seconds: float | None = None
    """The shortest of several calls, waiting for the device included."""
    floor_seconds: float | None = None
    """The bytes that must move at the least, at the copy bandwidth of the device."""

    ratio: float | None = None
    """How many times the floor it takes."""

    @property
    def slow(self) -> bool:
        return (self.ratio or 0.0) >= _SLOW_RATIO and (self.seconds or 0.0) >= _SLOW_SECONDS

    @property
    def bad(self) -> bool:
        return self.outcome not in ("ok", "limit")


class PackDescribed(msgspec.Struct, frozen=True, tag="about"):
    """The device and the pack of one dtype."""

    dtype: str
    device: str
    emulated: bool
    bandwidth: float | None
    """Bytes read and written in a second by a copy on the device; None if none could be measured."""
    checks: int


class PackRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The pack could not be made: one line that says why."""

    reason: str
    by_config: bool
    """The backend does not offer the dtype; otherwise it is broken."""


class ProbeBegun(msgspec.Struct, frozen=True, tag="begun"):
    """A check began. If nothing follows, it ended the process."""

    number: int
    primitive: str
    case: str
    size: str


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `fdcore doctor` found."""

    schema: int = 1
    fd_core: str
    machine: str
    backend: str
    packs: list[PackDescribed]
    findings: list[OpFinding]

    @property
    def well(self) -> bool:
        """Whether something ran, and nothing is missing or wrong."""
        return any(each.outcome == "ok" for each in self.findings) and not any(each.bad for each in self.findings)
