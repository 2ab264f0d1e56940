"""Where each of several engines of one machine computes, so that none takes what another one has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fd_core.errors import ConfigError

__all__ = ["EnginePlace", "places_on_cores", "places_on_devices"]

_FLAG = "--data-parallel-size"
_TOPOLOGY = Path("/sys/devices/system/cpu")


class EnginePlace(msgspec.Struct, frozen=True):
    """What one engine's process is given; by default all that this process has."""

    name: str = "engine"
    """The engine's name in the log."""
    cores: tuple[int, ...] = ()
    """Numbers of its processors; empty for all. Engines with processors of their own share the machine's memory."""
    environment: dict[str, str] = {}
    """Variables that show it its device."""


def places_on_cores(count: int) -> Sequence[EnginePlace]:
    """Divide the processors that this process may use into `count` equal parts; what is left over is nobody's.

    A part lies together: threads of one core, then cores of one socket. Raises `ConfigError` if there are too few.
    """
    usable = sorted(os.sched_getaffinity(0), key=lambda core: (*_position(core), core))
    if count > len(usable):
        raise ConfigError(
            f"{count} engines need a processor each, and there are {len(usable)}",
            field=_FLAG,
            hint=f"use at most {len(usable)}",
        )
    each = len(usable) // count
    return [
        EnginePlace(f"engine {index}", tuple(sorted(usable[index * each : (index + 1) * each])))
        for index in range(count)
    ]


def places_on_devices(variable: str, found: int, count: int) -> Sequence[EnginePlace]:
    """Give each of `count` engines one device, by the environment variable that shows devices to a process.

    `found`: devices of the machine. Raises `ConfigError` if fewer are shown to this process.
    """
    shown = os.environ.get(variable)
    devices = [str(index) for index in range(found)] if shown is None else shown.split(",")
    if count > len(devices):
        raise ConfigError(
            f"{count} engines need a device each, and there are {len(devices)}",
            field=_FLAG,
            hint=f"use at most {len(devices)}",
        )
    return [EnginePlace(f"engine {index}", environment={variable: devices[index].strip()}) for index in range(count)]


def _position(core: int) -> tuple[int, int]:
    """Return the socket and the core that a processor belongs to; zeros where the system does not tell."""
    folder = _TOPOLOGY / f"cpu{core}" / "topology"
    try:
        socket, number = ((folder / name).read_text(encoding="ascii") for name in ("physical_package_id", "core_id"))
        return int(socket), int(number)
    except (OSError, ValueError):
        return 0, 0
