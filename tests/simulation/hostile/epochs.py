"""Checks the fate of requests whose engine dies against a plain model of what each epoch received and published."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fd_core.engine.clients.client import DeltaStream
from fd_core.engine.clients.request_ledger import MAX_DEATHS, MAX_DEATHS_IN_VAIN
from fd_core.engine.process.messages import ClientMessage, StepEvents, Submit
from fd_core.simulation.engines.engine import SimulatedEngineClient
from fd_core.types import Delta, FinishReason, RequestSpec
from tests.simulation.hostile.computing import BrokenLaw

__all__ = ["WatchedEpochs"]


@dataclass(slots=True)
class _Asked:
    """State of an open request."""

    delivered: list[int]
    known: bool = False
    """True if it was submitted to this epoch."""
    admitted: bool = False
    advanced: bool = False
    """True if this epoch produced a token for it."""
    aborted: bool = False
    deaths: int = 0
    in_vain: int = 0
    """Epochs since its last token that admitted it and died."""
    end: FinishReason | None = None

    @property
    def suspected(self) -> bool:
        return self.in_vain > 0 and not self.advanced


class WatchedEpochs:
    """Observes the client of one engine: requests submitted to each epoch and deltas delivered to readers."""

    def __init__(self, name: str, client: SimulatedEngineClient) -> None:
        self.name = name
        self.given_up = 0
        """Number of requests failed because engines kept dying with them."""
        self._client = client
        self._asked: dict[str, _Asked] = {}
        self._held: deque[StepEvents] | None = None
        """Delayed messages."""
        self._submit, self._say = client.submit, client._send
        self._hear, self._die, self._abort = client._dispatch, client.die, client.abort
        client.submit = self._asks  # type: ignore[method-assign]
        client._send = self._sends  # type: ignore[method-assign]
        client._dispatch = self._tells  # type: ignore[method-assign]
        client.die = self._dies  # type: ignore[method-assign]
        client.abort = self._aborts  # type: ignore[method-assign]

    @property
    def open_requests(self) -> list[str]:
        """Ids of open requests."""
        return [name for name, _ in self._open()]

    def hold(self) -> None:
        """Delay the engine's messages from now on."""
        self._held = deque() if self._held is None else self._held

    def let_go(self) -> None:
        """Deliver delayed messages in order."""
        held, self._held = self._held or (), None
        for events in held:
            self._tells(events)

    def _asks(self, spec: RequestSpec, on_news: Callable[[Delta | None], None] | None = None) -> DeltaStream:
        before = self._asked.get(spec.request_id)
        self._asked[spec.request_id] = _Asked([])
        try:
            return self._submit(spec, on_news)
        except Exception:
            del self._asked[spec.request_id]
            if before is not None:
                self._asked[spec.request_id] = before
            raise

    def _sends(self, message: ClientMessage) -> None:
        if isinstance(message, Submit):
            self._looked_at(message.spec)
        self._say(message)

    def _looked_at(self, spec: RequestSpec) -> None:
        asked = self._asked[spec.request_id]
        asked.known = True
        if list(spec.delivered) != asked.delivered:
            raise BrokenLaw("1.1", f"{self.name} resumes {spec.request_id} after other tokens than were delivered")
        if asked.suspected:
            others = [name for name, other in self._open() if other.known and other.suspected]
            if others != [spec.request_id]:
                raise BrokenLaw("1.8", f"{self.name} sends suspects {others} to one epoch")

    def _tells(self, events: StepEvents) -> None:
        if self._held is not None:
            self._held.append(events)
            return
        if self._client.alive and events.epoch == self._client.info.epoch:
            for name in events.admitted:
                if name in self._asked:
                    self._asked[name].admitted = True
            for delta in events.deltas:
                if (asked := self._asked.get(delta.request_id)) is None or asked.end is not None:
                    continue
                asked.delivered += delta.token_ids
                asked.advanced |= bool(delta.token_ids)
                asked.end = delta.finish_reason
        self._hear(events)

    def _aborts(self, request_ids: list[str]) -> list[str]:
        for name, asked in self._open():
            asked.aborted |= name in request_ids
        return self._abort(request_ids)

    def _dies(self, reason: str) -> None:
        if not self._client.alive:
            return
        before = self._open()
        self._die(reason)
        there = self._client._streams
        for name, asked in before:
            if not asked.known:
                continue
            asked.deaths += 1
            if asked.advanced:
                asked.in_vain = 0
            elif asked.admitted:
                asked.in_vain += 1
            hopeless = asked.in_vain >= MAX_DEATHS_IN_VAIN or asked.deaths >= MAX_DEATHS
            asked.known = asked.admitted = asked.advanced = False
            self.given_up += hopeless
            if asked.aborted and name in there:
                raise BrokenLaw("1.7", f"{name} was aborted and is resumed after the death of {self.name}")
            if (hopeless or asked.aborted) is (name in there) and self._client.restarts:
                what = "is resubmitted" if name in there else "is failed"
                raise BrokenLaw(
                    "1.8", f"{name} {what} by {self.name} after {asked.deaths} deaths, {asked.in_vain} without progress"
                )

    def _open(self) -> list[tuple[str, _Asked]]:
        """Return open requests by id."""
        return [(name, asked) for name, asked in self._asked.items() if name in self._client._streams]
