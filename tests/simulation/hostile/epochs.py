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
class _Request:
    """State of an open request."""

    delivered: list[int]
    known: bool = False
    """True if it was submitted to this epoch."""
    admitted: bool = False
    advanced: bool = False
    """True if this epoch produced a token for it."""
    aborted: bool = False
    deaths: int = 0
    fruitless_deaths: int = 0
    """Epochs since its last token that admitted it and died."""
    end: FinishReason | None = None

    @property
    def suspected(self) -> bool:
        return self.fruitless_deaths > 0 and not self.advanced


class WatchedEpochs:
    """Observes the client of one engine: requests submitted to each epoch and deltas delivered to readers."""

    def __init__(self, name: str, client: SimulatedEngineClient) -> None:
        self.name = name
        self.given_up = 0
        """Number of requests failed because engines kept dying with them."""
        self._client = client
        self._requests: dict[str, _Request] = {}
        self._held: deque[StepEvents] | None = None
        """Delayed messages."""
        self._submit, self._send_message = client.submit, client._send
        self._deliver, self._die, self._abort = client._dispatch, client.die, client.abort
        client.submit = self._on_submit  # type: ignore[method-assign]
        client._send = self._on_send  # type: ignore[method-assign]
        client._dispatch = self._on_events  # type: ignore[method-assign]
        client.die = self._on_death  # type: ignore[method-assign]
        client.abort = self._on_abort  # type: ignore[method-assign]

    @property
    def open_requests(self) -> list[str]:
        """Ids of open requests."""
        return [name for name, _ in self._open()]

    def hold(self) -> None:
        """Delay the engine's messages from now on."""
        self._held = deque() if self._held is None else self._held

    def resume(self) -> None:
        """Deliver delayed messages in order."""
        held, self._held = self._held or (), None
        for events in held:
            self._on_events(events)

    def _on_submit(self, spec: RequestSpec, on_news: Callable[[Delta | None], None] | None = None) -> DeltaStream:
        before = self._requests.get(spec.request_id)
        self._requests[spec.request_id] = _Request([])
        try:
            return self._submit(spec, on_news)
        except Exception:
            del self._requests[spec.request_id]
            if before is not None:
                self._requests[spec.request_id] = before
            raise

    def _on_send(self, message: ClientMessage) -> None:
        if isinstance(message, Submit):
            self._check_resubmission(message.spec)
        self._send_message(message)

    def _check_resubmission(self, spec: RequestSpec) -> None:
        request = self._requests[spec.request_id]
        request.known = True
        if list(spec.delivered) != request.delivered:
            raise BrokenLaw("1.1", f"{self.name} resumes {spec.request_id} after other tokens than were delivered")
        if request.suspected:
            others = [name for name, other in self._open() if other.known and other.suspected]
            if others != [spec.request_id]:
                raise BrokenLaw("1.8", f"{self.name} sends suspects {others} to one epoch")

    def _on_events(self, events: StepEvents) -> None:
        if self._held is not None:
            self._held.append(events)
            return
        if self._client.alive and events.epoch == self._client.info.epoch:
            for name in events.admitted:
                if name in self._requests:
                    self._requests[name].admitted = True
            for delta in events.deltas:
                if (request := self._requests.get(delta.request_id)) is None or request.end is not None:
                    continue
                request.delivered += delta.token_ids
                request.advanced |= bool(delta.token_ids)
                request.end = delta.finish_reason
        self._deliver(events)

    def _on_abort(self, request_ids: list[str]) -> list[str]:
        for name, request in self._open():
            request.aborted |= name in request_ids
        return self._abort(request_ids)

    def _on_death(self, reason: str) -> None:
        if not self._client.alive:
            return
        before = self._open()
        self._die(reason)
        there = self._client._streams
        for name, request in before:
            if not request.known:
                continue
            request.deaths += 1
            if request.advanced:
                request.fruitless_deaths = 0
            elif request.admitted:
                request.fruitless_deaths += 1
            hopeless = request.fruitless_deaths >= MAX_DEATHS_IN_VAIN or request.deaths >= MAX_DEATHS
            request.known = request.admitted = request.advanced = False
            self.given_up += hopeless
            if request.aborted and name in there:
                raise BrokenLaw("1.7", f"{name} was aborted and is resumed after the death of {self.name}")
            if (hopeless or request.aborted) is (name in there) and self._client.restarts:
                what = "is resubmitted" if name in there else "is failed"
                raise BrokenLaw(
                    "1.8",
                    f"{name} {what} by {self.name} after {request.deaths} deaths, {request.fruitless_deaths} fruitless",
                )

    def _open(self) -> list[tuple[str, _Request]]:
        """Return open requests by id."""
        return [(name, request) for name, request in self._requests.items() if name in self._client._streams]
