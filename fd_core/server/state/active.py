"""Which requests run, under which ids, and whose they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

__all__ = ["ActiveRequests"]

_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_", "msg_")


class ActiveRequests:
    """Which engine requests belong to which HTTP request.

    A client may use one request id for several requests at the same time (a trace id), and so may clients with other
    keys; engine ids are unique.
    """

    def __init__(self) -> None:
        self._engine_ids: dict[str, dict[str, str]] = {}
        """Engine ids by request id, each with the owner of its request."""
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._engine_ids)

    def enter(self, request_id: str, count: int, owner: str = "") -> list[str]:
        """Reserve `count` engine ids for a request of an owner's."""
        serial = next(self._serial)
        ids = [f"{request_id}.{serial:x}.{index}" for index in range(count)]
        self._engine_ids.setdefault(request_id, {}).update(dict.fromkeys(ids, owner))
        return ids

    def leave(self, request_id: str, engine_ids: list[str]) -> None:
        """Forget engine ids of a request that has ended."""
        left = self._engine_ids[request_id]
        for engine_id in engine_ids:
            del left[engine_id]
        if not left:
            del self._engine_ids[request_id]

    def engine_ids(self, given: str, reaches: Callable[[str], bool]) -> list[str]:
        """Return the engine ids behind a request id or the `id` of an answer; empty if none is active.

        Only requests whose owner the caller `reaches` are looked at: which ids others use changes nothing. A request id
        may look like the `id` of another answer; both are meant then, whichever worker has them.
        """
        names = (given, *(given.removeprefix(prefix) for prefix in _PREFIXES if given.startswith(prefix)))
        return [each for name in names for each, owner in self._engine_ids.get(name, {}).items() if reaches(owner)]

    def all_ids(self, reaches: Callable[[str], bool]) -> list[str]:
        """Return the engine ids of every request whose owner the caller `reaches`."""
        return [each for ids in self._engine_ids.values() for each, owner in ids.items() if reaches(owner)]

    @staticmethod
    def request_id(engine_id: str) -> str:
        """Return the request id that an engine id was made from."""
        return engine_id.rsplit(".", 2)[0]
