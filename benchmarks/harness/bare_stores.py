"""Baselines of the store benchmark: the same bytes moved without any layer around them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fd_core.kv.stores.location import StoreLocation

__all__ = ["Bare", "bare_for"]

_REDIS = {
    **dict.fromkeys(("redis", "valkey"), "redis"),
    **dict.fromkeys(("rediss", "valkeys"), "rediss"),
    **dict.fromkeys(("unix", "redis+unix"), "unix"),
}
"""Schemes of one server, and redis-py's names for them."""


class Bare(Protocol):
    """The plainest way to the same place."""

    what: str

    def write(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        """Put each value under its name."""

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Return the values."""

    def delete(self, names: Sequence[str]) -> None:
        """Take them away."""


class BareFiles:
    """One file for each value, written under another name and renamed, with one call each."""

    what = "plain files"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def write(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        for name, value in zip(names, values, strict=True):
            with (self._folder / "new").open("wb", buffering=0) as file:
                file.write(value)
            (self._folder / "new").rename(self._folder / name)

    def read(self, names: Sequence[str]) -> list[bytes]:
        found = []
        for name in names:
            with (self._folder / name).open("rb", buffering=0) as file:
                found.append(file.read())
        return found

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            (self._folder / name).unlink()


class BareRedis:
    """redis-py: one pipeline of SET, one MGET."""

    what = "redis-py"

    def __init__(self, address: str) -> None:
        import redis

        self._client: Any = redis.Redis.from_url(address)

    def write(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for name, value in zip(names, values, strict=True):
                pipeline.set(name, value)
            pipeline.execute()

    def read(self, names: Sequence[str]) -> list[bytes]:
        return self._client.mget(names)

    def delete(self, names: Sequence[str]) -> None:
        self._client.delete(*names)


def bare_for(location: StoreLocation) -> Bare | None:
    """Return the baseline for the store of `location`, None if there is none."""
    if location.scheme == "disk":
        return BareFiles(Path(location.rest).expanduser() / "bare")
    base = _REDIS.get(location.scheme)
    return BareRedis(base + location.text.removeprefix(location.scheme)) if base else None
