"""Direct access to stored KV values, bypassing the engine's store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fd_core.testing.stores import BackDoor
from tests.kv.stores.test_disk import DiskDoor

__all__ = ["RawStore", "in_folder", "on_server"]


@dataclass(frozen=True, slots=True)
class RawStore:
    """Location of a store, direct access to its values, and its keys."""

    location: str
    access: BackDoor
    keys: Callable[[], list[bytes]]

    def values(self) -> dict[bytes, bytes]:
        found = {key: self.access.read(key) for key in self.keys()}
        return {key: value for key, value in found.items() if value is not None}


def in_folder(folder: Path) -> RawStore:
    return RawStore(
        f"disk:{folder}", DiskDoor(folder), lambda: sorted(bytes.fromhex(p.stem) for p in folder.glob("??/*.kv"))
    )


def on_server(server: Any) -> RawStore:
    from door import Door

    def keys() -> list[bytes]:
        return sorted(bytes.fromhex(name.removeprefix(b"fd:").decode()) for name in server.back_door.keys("fd:*"))

    return RawStore(server.unix_url, Door(server), keys)
