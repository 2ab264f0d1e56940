"""Reader of KV events that tracks only the paths of cached blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fd_core.types.kv_events import BEGINNING, Cleared, KVEvent, Removed, Stored

SIZE = 2
"""Tokens per block."""


def ids(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


class Reader:
    """Fails on an event that it cannot apply."""

    def __init__(self) -> None:
        self._path_of: dict[bytes, tuple[int, ...]] = {}

    @property
    def paths(self) -> set[tuple[int, ...]]:
        """All tokens up to the end of each cached block."""
        return set(self._path_of.values())

    def apply(self, event: KVEvent) -> None:
        match event:
            case Stored(parent, keys, tokens):
                path = () if parent == BEGINNING else self._path_of[parent]
                blocks = np.frombuffer(tokens, "<i4").reshape(len(keys), SIZE).tolist()
                for key, block in zip(keys, blocks, strict=True):
                    path = (*path, *block)
                    self._path_of[key] = path
            case Removed(keys):
                for key in keys:
                    del self._path_of[key]
            case Cleared():
                self._path_of.clear()
