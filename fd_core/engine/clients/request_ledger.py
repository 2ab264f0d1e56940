"""Records the tokens delivered to each live request, so that another epoch of the engine can resume the request.

Pure, like the scheduler. The client of an engine owns the ledger, because only the client knows which tokens reached
their reader, and it outlives every epoch. A new epoch gets a request with the tokens of earlier epochs and admits it
like a request that returns from a preemption, so its reader sees one golden stream (the protocol's sections 1.1, 1.8
and 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from fd_core.types import Delta, FinishReason, RequestSpec

MAX_DEATHS_IN_VAIN = 2
"""Deaths of epochs that admitted a request without giving it a token, after which it is given up: the request may be
the cause. Epochs in which it only waited do not count, and an epoch that gives it a token resets the count.
After the first of these deaths the request is a suspect. An epoch gets one suspect at a time, so that a request which
merely ran alongside the cause is not given up with it."""
MAX_DEATHS = 5
"""Deaths of epochs after which a request is given up, even if it only waited or got tokens."""


class _LiveRequest(msgspec.Struct):
    """A request that has not ended."""

    spec: RequestSpec
    delivered: list[int]
    cached_reported: bool = False
    """True if the cached tokens of the prompt were reported; reports of later epochs are omitted."""
    aborting: bool = False
    admitted: bool = False
    """True if the current epoch gave the request a slot."""
    advanced: bool = False
    """True if the current epoch gave the request a token."""
    deaths: int = 0
    in_vain: int = 0
    """Epochs since the last token that gave it a slot and died."""

    @property
    def suspected(self) -> bool:
        """True if the request may have killed the previous epoch, and has not got a token since."""
        return self.in_vain > 0 and not self.advanced


class RequestLedger:
    """The requests that were begun and have not ended, in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[str, _LiveRequest] = {}
        self.held_suspects: dict[str, None] = {}
        """Suspects not yet submitted to the current epoch, in order of arrival."""
        self._tried = ""
        """The suspect submitted to the current epoch last."""

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def lengths(self) -> Iterator[tuple[str, int, int]]:
        """Yield the id of each request, with its prompt tokens and the tokens delivered so far."""
        for request_id, entry in self._entries.items():
            yield request_id, len(entry.spec.prompt), len(entry.delivered)

    def begin(self, spec: RequestSpec) -> None:
        """Add a request."""
        self._entries[spec.request_id] = _LiveRequest(spec, list(spec.delivered))

    def admitted(self, request_ids: Iterable[str]) -> None:
        """Record that the current epoch gave these requests slots; if it dies now, one of them may be the cause."""
        for request_id in request_ids:
            if (entry := self._entries.get(request_id)) is not None:
                entry.admitted = True

    def deliver(self, delta: Delta) -> Delta | None:
        """Record a delta of the current epoch and return it as its reader should see it; None without a reader."""
        entry = self._entries.get(delta.request_id)
        if entry is None:
            return None
        if delta.token_ids:
            entry.delivered += delta.token_ids
            entry.advanced = True
        if delta.finish_reason is not None:
            del self._entries[delta.request_id]
            self.held_suspects.pop(delta.request_id, None)
        if delta.cached_tokens is None:
            return delta
        if entry.cached_reported:
            return msgspec.structs.replace(delta, cached_tokens=None)
        entry.cached_reported = True
        return delta

    def aborting(self, request_ids: Iterable[str]) -> None:
        """Record that these requests are being aborted; if the engine dies first, they end as aborted all the same."""
        for request_id in request_ids:
            self._entries[request_id].aborting = True

    def drop(self, request_id: str) -> None:
        """Forget a request without a reader, or one that was ended elsewhere."""
        self._entries.pop(request_id, None)
        self.held_suspects.pop(request_id, None)

    def died(self, reason: str) -> list[Delta]:
        """Record the death of the epoch; return the last deltas of the requests that are not resubmitted."""
        known = [entry for name, entry in self._entries.items() if name not in self.held_suspects]
        ends = [end for entry in known if (end := _finish_suspect(entry, reason)) is not None]
        for end in ends:
            del self._entries[end.request_id]
        self.held_suspects = {}
        return ends

    def resubmissions(self) -> list[RequestSpec]:
        """Return the requests for a new epoch in order of arrival; of suspects the first, see `next_suspect`."""
        suspects = [name for name, entry in self._entries.items() if entry.suspected]
        self._tried, self.held_suspects = suspects[0] if suspects else "", dict.fromkeys(suspects[1:])
        return [_resumed(entry) for name, entry in self._entries.items() if name not in self.held_suspects]

    def next_suspect(self) -> RequestSpec | None:
        """Return the suspect that the current epoch should try next; None while it tries one, or if none is left."""
        if not self.held_suspects or ((tried := self._entries.get(self._tried)) is not None and tried.suspected):
            return None
        self._tried = next(iter(self.held_suspects))
        del self.held_suspects[self._tried]
        return _resumed(self._entries[self._tried])


def _resumed(entry: _LiveRequest) -> RequestSpec:
    return msgspec.structs.replace(entry.spec, delivered=tuple(entry.delivered))


def _finish_suspect(entry: _LiveRequest, reason: str) -> Delta | None:
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
        error=f"the engine died {entry.deaths} times with this request, which is not retried ({reason})",
    )
