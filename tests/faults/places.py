"""Where the values of an engine lie, and the way to them past its store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fd_core.testing.stores import BackDoor
from tests.kv.stores.test_disk import DiskDoor

__all__ = ["Place", "in_folder", "on_server"]


@dataclass(frozen=True, slots=True)
class Place:
    """A store's location, its back door, and which keys lie there."""

    location: str
    door: BackDoor
    keys: Callable[[], list[bytes]]

    def values(self) -> dict[bytes, bytes]:
        found = {key: self.door.read(key) for key in self.keys()}
        return {key: value for key, value in found.items() if value is not None}


def in_folder(folder: Path) -> Place:
    return Place(
        f"disk:{folder}", DiskDoor(folder), lambda: sorted(bytes.fromhex(p.stem) for p in folder.glob("??/*.kv"))
    )


def on_server(server: Any) -> Place:
    from door import Door

    def keys() -> list[bytes]:
        return sorted(bytes.fromhex(name.removeprefix(b"fd:").decode()) for name in server.back_door.keys("fd:*"))

    return Place(server.unix_url, Door(server), keys)
