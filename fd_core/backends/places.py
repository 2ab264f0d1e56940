"""Device assignment for several engines of one machine, so that none takes what another one has."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from fd_core.errors import ConfigError

_FLAG = "--data-parallel-size"
_TOPOLOGY = Path("/sys/devices/system/cpu")


class EnginePlace(msgspec.Struct, frozen=True):
    """Devices and cores of one engine's process; by default all that this process has."""

    name: str = "engine"
    """The engine's name in the log."""
    cores: tuple[int, ...] = ()
    """Numbers of its processors; empty for all. Engines with processors of their own share the machine's memory."""
    environment: dict[str, str] = {}
    """Variables that show it its device."""


def places_on_cores(count: int, ranks: int = 1) -> Sequence[EnginePlace]:
    """Divide the processors that this process may use into `count` equal parts; the remainder is not assigned.

    A part lies together: threads of one core, then cores of one socket; the ranks of an engine share it. Raises
    `ConfigError` if there are too few.
    """
    usable = sorted(os.sched_getaffinity(0), key=lambda core: (*_position(core), core))
    _require_enough(count, ranks, len(usable), "processor")
    each = len(usable) // count
    return [
        EnginePlace(f"engine {index}", tuple(sorted(usable[index * each : (index + 1) * each])))
        for index in range(count)
    ]


def places_on_devices(variable: str, found: int, count: int, ranks: int = 1) -> Sequence[EnginePlace]:
    """Give each of `count` engines a device for each rank, by the environment variable that shows devices to a process.

    `found`: devices of the machine. Raises `ConfigError` if fewer are shown to this process.
    """
    devices = _shown(variable, found)
    _require_enough(count, ranks, len(devices), "device")
    return [
        EnginePlace(f"engine {index}", environment={variable: ",".join(devices[index * ranks : (index + 1) * ranks])})
        for index in range(count)
    ]


def rank_devices(variable: str, found: int, size: int) -> Sequence[Mapping[str, str]]:
    """Return what shows each of `size` ranks of one engine its device; `found` as in `places_on_devices`.

    Raises `ConfigError` if there are fewer.
    """
    devices = _shown(variable, found)
    if size > len(devices):
        raise ConfigError(
            f"{size} ranks need a device each, and there are {len(devices)}",
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
        needs, most = f"{count} engines need a {what} each, and there are {found}", f"use at most {found}"
    else:
        needs = (
            f"{count} engines of {ranks} ranks need {count * ranks} {what}s, one for each rank, and there are {found}"
        )
        engines = found // ranks
        most = f"use at most {engines}, or fewer ranks" if engines > 1 else "leave it out, or use fewer ranks"
    raise ConfigError(needs, field=_FLAG, hint=most)


def _position(core: int) -> tuple[int, int]:
    """Return the socket and the core that a processor belongs to; zeros where the system does not tell."""
    folder = _TOPOLOGY / f"cpu{core}" / "topology"
    try:
        socket, number = ((folder / name).read_text(encoding="ascii") for name in ("physical_package_id", "core_id"))
        return int(socket), int(number)
    except (OSError, ValueError):
        return 0, 0
