"""Device assignment for several engines of one machine, so that no two share a device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from fd_core.errors import ConfigError

_FLAG = "--data-parallel-size"
_TOPOLOGY = Path("/sys/devices/system/cpu")


class DeviceAssignment(msgspec.Struct, frozen=True):
    """Devices and cores of one engine's process; by default all of this process."""

    name: str = "engine"
    """The engine's name in the log."""
    cores: tuple[int, ...] = ()
    """CPU numbers; empty for all. Engines with separate CPUs share the machine's memory."""
    environment: dict[str, str] = {}
    """Environment variables that select its device."""


def assignments_on_cores(count: int, ranks: int = 1) -> Sequence[DeviceAssignment]:
    """Divide the CPUs that this process may use into `count` equal parts; the remainder is not assigned.

    A part is compact: threads of one core, then cores of one socket; the ranks of an engine share it. Raises
    `ConfigError` if there are too few.
    """
    usable = sorted(os.sched_getaffinity(0), key=lambda core: (*_position(core), core))
    _require_enough(count, ranks, len(usable), what="processor")
    each = len(usable) // count
    return [
        DeviceAssignment(f"engine {index}", tuple(sorted(usable[index * each : (index + 1) * each])))
        for index in range(count)
    ]


def assignments_on_devices(variable: str, found: int, count: int, ranks: int = 1) -> Sequence[DeviceAssignment]:
    """Assign each rank of `count` engines a device, by the environment variable that selects visible devices.

    `found`: devices of the machine. Raises `ConfigError` if fewer are visible to this process.
    """
    devices = _shown(variable, found)
    _require_enough(count, ranks, len(devices), what="device")
    return [
        DeviceAssignment(
            f"engine {index}", environment={variable: ",".join(devices[index * ranks : (index + 1) * ranks])}
        )
        for index in range(count)
    ]


def rank_devices(variable: str, found: int, size: int) -> Sequence[Mapping[str, str]]:
    """Return the environment variables that assign each of `size` ranks of one engine a device; `found` as in
    `assignments_on_devices`.

    Raises `ConfigError` if there are fewer.
    """
    devices = _shown(variable, found)
    if size > len(devices):
        raise ConfigError(
            f"{size} ranks need one device each, found {len(devices)}",
            field="--tensor-parallel-size",
            hint=f"use at most {len(devices)}",
        )
    return [{variable: device} for device in devices[:size]]


def _shown(variable: str, found: int) -> Sequence[str]:
    shown = os.environ.get(variable)
    return [str(index) for index in range(found)] if shown is None else [each.strip() for each in shown.split(",")]


def _require_enough(count: int, ranks: int, found: int, what: str) -> None:
    if count * ranks <= found:
        return
    if ranks == 1:
        needs, most = f"{count} engines need one {what} each, found {found}", f"use at most {found}"
    else:
        needs = f"{count} engines of {ranks} ranks need {count * ranks} {what}s, one per rank, found {found}"
        engines = found // ranks
        most = f"use at most {engines}, or fewer ranks" if engines > 1 else "omit it, or use fewer ranks"
    raise ConfigError(needs, field=_FLAG, hint=most)


def _position(core: int) -> tuple[int, int]:
    """Return the socket and the core of a CPU; zeros if the system does not publish them."""
    folder = _TOPOLOGY / f"cpu{core}" / "topology"
    try:
        socket, number = ((folder / name).read_text(encoding="ascii") for name in ("physical_package_id", "core_id"))
        return int(socket), int(number)
    except (OSError, ValueError):
        return 0, 0
