"""What each live request was delivered, so that another epoch of the engine can go on with it.

Pure, as the scheduler is. The client of an engine owns the ledger: it alone knows what it handed on, and it outlives
every epoch. A request goes to an epoch with the tokens of the epochs before it and is admitted as one that comes back
from a preemption, so its reader sees one golden stream (the protocol's sections 1.1, 1.8 and 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from fd_core.engine.messages import Delta
from fd_core.types import FinishReason, RequestSpec

__all__ = ["MAX_DEATHS", "MAX_DEATHS_IN_VAIN", "Ledger"]

MAX_DEATHS_IN_VAIN = 2
"""A request is given up when so many epochs gave it a slot and died before they gave it a token: it may be what kills
them. Epochs in which it only waited are not held against it, and one that gave it a token clears it."""
MAX_DEATHS = 5
"""A request is given up when so many epochs died with it, wherever it was and whatever they gave it."""


class _Entry:
    """A request that has not ended."""

    __slots__ = ("aborting", "admitted", "advanced", "deaths", "delivered", "in_vain", "spec", "told_cached")

    def __init__(self, spec: RequestSpec) -> None:
        self.spec = spec
        self.delivered = list(spec.delivered)
        self.told_cached = False
        """Whether the reader knows how much of the prompt was cached; a later epoch must not tell another number."""
        self.aborting = False
        self.admitted = False
        """Whether the living epoch gave it a slot."""
        self.advanced = False
        """Whether the living epoch gave it a token."""
        self.deaths = 0
        self.in_vain = 0
        """Epochs since the last token that gave it a slot and died."""


class Ledger:
    """The requests that were begun and have not ended, in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def begin(self, spec: RequestSpec) -> None:
        """A request starts."""
        self._entries[spec.request_id] = _Entry(spec)

    def admitted(self, request_ids: Iterable[str]) -> None:
        """The living epoch gave these requests slots; from here on its death may be their doing."""
        for request_id in request_ids:
            if (entry := self._entries.get(request_id)) is not None:
                entry.admitted = True

    def deliver(self, delta: Delta) -> Delta | None:
        """Note what the living epoch sent and return what its reader is to see, None if nobody reads it."""
        entry = self._entries.get(delta.request_id)
        if entry is None:
            return None
        if delta.token_ids:
            entry.delivered += delta.token_ids
            entry.advanced = True
        if delta.finish_reason is not None:
            del self._entries[delta.request_id]
        if delta.cached_tokens is None:
            return delta
        if entry.told_cached:
            return msgspec.structs.replace(delta, cached_tokens=None)
        entry.told_cached = True
        return delta

    def aborting(self, request_ids: Iterable[str]) -> None:
        """The engine was asked to abort these requests; should it die first, they end so all the same."""
        for request_id in request_ids:
            self._entries[request_id].aborting = True

    def drop(self, request_id: str) -> None:
        """Nobody reads the request any more, or it was ended elsewhere."""
        self._entries.pop(request_id, None)

    def died(self, reason: str) -> list[Delta]:
        """The epoch died of `reason`; return the last deltas of those that no other epoch is given."""
        ends = [end for entry in self._entries.values() if (end := _end_by_death(entry, reason)) is not None]
        for end in ends:
            del self._entries[end.request_id]
        return ends

    def resubmissions(self) -> list[RequestSpec]:
        """Return what a new epoch is asked: every request, with the tokens delivered so far, in order of arrival."""
        return [
            msgspec.structs.replace(entry.spec, delivered=tuple(entry.delivered)) for entry in self._entries.values()
        ]


def _end_by_death(entry: _Entry, reason: str) -> Delta | None:
    entry.deaths += 1
    if entry.advanced:
        entry.in_vain = 0
    elif entry.admitted:
        entry.in_vain += 1
    entry.admitted = entry.advanced = False
    if entry.aborting:
        return Delta(entry.spec.request_id, finish_reason=FinishReason.ABORT)
    if entry.in_vain < MAX_DEATHS_IN_VAIN and entry.deaths < MAX_DEATHS:
        return None
    return Delta(
        entry.spec.request_id,
        finish_reason=FinishReason.ERROR,
        error=f"the engine died {entry.deaths} times with this request, which is not tried again ({reason})",
    )
