"""Which requests run, under which ids, and whose they are."""

from __future__ import annotations

import itertools
from typing import Final

__all__ = ["ActiveRequests"]

_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_", "msg_")


class ActiveRequests:
    """Which engine requests belong to which HTTP request.

    A client may use one request id for several requests at the same time (a trace id); engine ids are unique.
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

    def engine_ids(self, given: str, owner: str | None = None) -> list[str]:
        """Return the engine ids behind a request id or the `id` of an answer; empty if none is active.

        With `owner`, those of other owners are left out.
        """
        for name in (given, *(given.removeprefix(prefix) for prefix in _PREFIXES)):
            if name in self._engine_ids:
                return [each for each, whose in self._engine_ids[name].items() if owner in (None, whose)]
        return []

    def of_others(self, request_id: str, owner: str) -> bool:
        """Whether a request of another owner runs under this id."""
        return any(each != owner for each in self._engine_ids.get(request_id, {}).values())

    @staticmethod
    def request_id(engine_id: str) -> str:
        """Return the request id that an engine id was made from."""
        return engine_id.rsplit(".", 2)[0]
