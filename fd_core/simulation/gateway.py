"""A simulated gateway, which forwards requests and responses; the production router makes every routing decision."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from fd_core.disagg.ticket import sign_ticket
from fd_core.router.attempts import Attempts, Unreached
from fd_core.router.router import Router
from fd_core.router.selection import NoWorker, RouteRequest, Selection
from fd_core.router.workers import RouterWorker, WorkerState
from fd_core.simulation.clients import SimulatedClient
from fd_core.simulation.clock.timeline import Network, Timeline
from fd_core.simulation.engines.engine import SimulatedWorker
from fd_core.simulation.storage.storage import SECRET
from fd_core.types import Delta, FinishReason, RequestSpec


class SimulatedGateway:
    """One router process: selects workers, checks their health and forwards responses."""

    def __init__(
        self,
        timeline: Timeline,
        name: str,
        make_router: Callable[[], Router],
        workers: Sequence[SimulatedWorker],
        network: Network,
        draw: random.Random,
    ) -> None:
        """Register `workers` at the start and treat them as healthy."""
        self.name = name
        self.checks = 0
        self._make_router = make_router
        self._timeline = timeline
        self._network = network
        self._draw = draw
        self._workers = {worker.url: worker for worker in workers}
        self._attempts: dict[str, dict[_Attempt, None]] = {url: {} for url in self._workers}
        """Attempts that wait for a worker, by its address."""
        self._by_request: dict[str, _Attempt] = {}
        self._start()

    def _start(self) -> None:
        self.router = self._make_router()
        self._asked: set[RouterWorker] = set()
        """Incarnations with a health check in flight on a slow link."""
        self._following: dict[RouterWorker, tuple[str, int | None]] = {}
        """The process whose KV events count, by incarnation, and the number of the next event."""
        self._unreached = Unreached(30.0)  # seconds, the default of the gateway
        for worker in self._workers.values():
            instance = worker.instance if self._reached(worker) else None
            self.router.register(worker.url, worker.role, self._timeline.now, instance=instance)
        self.check()

    def restart(self) -> None:
        """End the process, and with it every connection to clients and workers; restart with empty state."""
        for attempts in self._attempts.values():
            for attempt in [*attempts]:
                attempt.leave()
                attempt.exchange.reader.broken(502, "the router's process ended")
        self._start()

    @property
    def num_open(self) -> int:
        """Attempts that have not ended."""
        return sum(map(len, self._attempts.values()))

    def ask(self, spec: RequestSpec, asked: RouteRequest, reader: SimulatedClient) -> None:
        """Receive a client's request from the network."""
        exchange = _Exchange(self, spec, reader, attempts=Attempts(self.router, asked))
        exchange.go(exchange.attempts.first(self._timeline.now, self._draw.random()))

    def leave(self, request_id: str) -> None:
        """The client of a request has disconnected: disconnect from the worker too."""
        if (attempt := self._by_request.get(request_id)) is not None:
            attempt.leave()

    def learn(self, worker: SimulatedWorker) -> None:
        """Apply a worker's events of the prefixes on its device, where the policy can use them."""
        known = self.router.registry.at(worker.url)
        client, reported = worker.client, self.router.reported_kv
        if known is None or client is None or client.kv_log is None or not self.router.uses_prefix(known):
            return
        instance, after = self._following.get(known, ("", None))
        if instance != worker.instance:
            after = None
        following, events = client.kv_log.read(after)
        if after is None and not reported.begin(known, client.info.block_size, worker.instance):
            return
        self._following[known] = worker.instance, following
        try:
            for event in events:
                reported.apply(known, event)
        except ValueError:  # more blocks than the router tracks: the worker's routed prompts count instead
            reported.end(known)
            del self._following[known]

    def register(self, worker: SimulatedWorker) -> None:
        """Register a worker's process; it is checked before it gets requests."""
        instance = worker.instance if worker.up else None
        self.router.register(worker.url, worker.role, self._timeline.now, instance=instance)
        self.check()

    def check(self) -> None:
        """Check the health of every worker, and apply the results to requests that wait for its response."""
        for known in self.router.workers():
            worker = self._workers[known.url]
            self.checks += 1
            if (delay := self._network.delay(self.name, worker.name)) and self._reached(worker):
                self._check_slowly(known, worker, delay)
            else:
                self._take(known, worker, self._poll(worker))

    def _check_slowly(self, known: RouterWorker, worker: SimulatedWorker, delay: float) -> None:
        """Check health over a slow link, one check at a time; another process may be registered before the reply."""
        if known in self._asked:
            return
        self._asked.add(known)
        timeline, router = self._timeline, self.router

        def come() -> None:
            timeline.after(delay, partial(answer, self._poll(worker)))

        def answer(health: _Health) -> None:
            if self.router is router:
                self._asked.discard(known)
                self._take(known, worker, health)

        limit = router.config.health_check_timeout_secs
        if 2 * delay > limit:
            timeline.after(limit, lambda: answer(_SILENT))
        else:
            timeline.after(delay, come)

    def _poll(self, worker: SimulatedWorker) -> _Health:
        if not self._reached(worker):
            return _SILENT
        client = worker.client
        if client is None or not worker.healthy:
            return _Health(worker.instance)
        return _Health(worker.instance, worker.role, client.info.kv_port, leaving=worker.leaving)

    def _take(self, known: RouterWorker, worker: SimulatedWorker, health: _Health) -> None:
        """Apply the reply, or the failure, of a health check."""
        now, ok = self._timeline.now, health.role is not None
        after = self.router.health(known, ok, now, instance=health.instance, role=health.role, kv_port=health.kv_port)
        if health.leaving:
            self.router.leaving(after)
        if health.instance is not None:
            self._unreached.reached(after.url)
            return
        silent, member = self._unreached.missed(after.url, now, now), self.router.registry.member(after)
        unhealthy = member is not None and member.state is WorkerState.UNHEALTHY
        for attempt in [*self._attempts[after.url]]:
            if silent if attempt.selection.started else unhealthy:
                attempt.lost("the worker cannot be reached")

    def _reached(self, worker: SimulatedWorker) -> bool:
        return worker.up and not worker.timeline.frozen and self._network.reaches(self.name, worker.name)


class _Health(NamedTuple):
    """Reply to a health check; empty if the check did not reach a process."""

    instance: str | None = None
    role: str | None = None
    """Role that the worker reports, if it is healthy."""
    kv_port: int | None = None
    leaving: bool = False


_SILENT: Final = _Health()


class _Exchange(NamedTuple):
    """One request: attempts on one worker after the other until one responds."""

    gateway: SimulatedGateway
    spec: RequestSpec
    reader: SimulatedClient
    attempts: Attempts[tuple[int, str]]

    def go(self, chosen: Selection | None) -> None:
        """Try the selected workers, or report to the client why there are none."""
        if chosen is not None:
            _Attempt(self, chosen).begin()
            return
        result = self.attempts.result
        self.reader.broken(*((result.status, result.message) if isinstance(result, NoWorker) else result))


class _Attempt:
    """One request at one worker, or pair; its `Selection` is released exactly once, at its end."""

    __slots__ = ("_arrived", "_network", "_over", "_reader", "_worker", "exchange", "selection")

    def __init__(self, exchange: _Exchange, selection: Selection) -> None:
        self.exchange = exchange
        self.selection = selection
        self._network = exchange.gateway._network
        self._reader = exchange.reader
        self._worker = exchange.gateway._workers[selection.decode.url]
        self._arrived = False
        self._over = False

    def begin(self) -> None:
        self.exchange.reader.tried()
        gateway, spec = self.exchange.gateway, self.exchange.spec
        gateway._attempts[self._worker.url][self] = None
        gateway._by_request[spec.request_id] = self
        if self.selection.mode == "pd":
            peer = gateway._workers[self.selection.prefill.url]
            ticket = sign_ticket(SECRET, spec.request_id, f"{peer.name}:{self.selection.kv_port}")
            spec = msgspec.structs.replace(spec, prefill_at=ticket)

        def arrive() -> None:
            self._arrived = True
            if not self._over:
                self._worker.take(spec, self)

        def give_up() -> None:
            if not (self._arrived or self._over):
                self._lost("the worker cannot be reached", severe=True)

        gateway._network.send(gateway.name, self._worker.name, arrive)
        if not gateway._network.reaches(gateway.name, self._worker.name):
            gateway._timeline.after(3.0, give_up)  # the default of the gateway

    def leave(self) -> None:
        """The client disconnected; the worker is notified over the network."""
        self._end()
        worker, request_id = self._worker, self.exchange.spec.request_id
        gateway = self.exchange.gateway
        gateway._network.send(gateway.name, worker.name, lambda: worker.leave(request_id))

    # Events of the worker, at the time at which it sends them ------------------------------------------------

    def answered(self, delta: Delta) -> None:
        """Forward a part of the response; only the first and the last change counters."""
        network = self._network
        if network.healthy and delta.finish_reason is None and self.selection.started:  # nearly always
            if not self._over:
                self._reader.read(delta, self._worker.index)
            return
        gateway, place = self.exchange.gateway, self._worker.name
        if network.clear(place, gateway.name):
            self._read(delta)
        else:
            network.send(place, gateway.name, lambda: self._read(delta))

    def _read(self, delta: Delta) -> None:
        if self._over:
            return
        if delta.finish_reason is FinishReason.ERROR:
            # A server sends this instead of a response, or at the end of a partial one.
            reason = delta.error or "the engine failed"
            self._on_response(lambda: self._lost(reason) if self.selection.started else self._refused(500, reason))
            return
        if not self.selection.started:
            attempts = self.exchange.attempts
            attempts.prefilled(delta.prefill, self.exchange.gateway._timeline.now)
            attempts.began()
        self._reader.read(delta, self._worker.index)
        if delta.finish_reason is not None:
            self._on_response(self._served)

    def refused(self, status: int, reason: str) -> None:
        """The worker rejects the request: another one may accept it, unless the request itself is invalid."""
        self._on_response(lambda: self._refused(status, reason))

    def lost(self, reason: str) -> None:
        severe = not self._worker.up
        self._on_response(lambda: self._lost(reason, severe=severe))

    # The same events, when they have reached the gateway -------------------------------------------------------

    def _on_response(self, then: Callable[[], None]) -> None:
        gateway = self.exchange.gateway

        def heard() -> None:
            if not self._over:
                then()

        gateway._network.send(self._worker.name, gateway.name, heard)

    def _served(self) -> None:
        self.exchange.attempts.ended(200, self.exchange.gateway._timeline.now)
        self._end()

    def _refused(self, status: int, reason: str) -> None:
        exchange = self.exchange
        elsewhere = exchange.attempts.refused(status, (status, reason), exchange.gateway._timeline.now)
        self._end()
        if elsewhere:
            self._again()
        else:
            exchange.reader.broken(status, reason)

    def _lost(self, reason: str, *, severe: bool = False) -> None:
        exchange = self.exchange
        exchange.attempts.lost(exchange.gateway._timeline.now, severe=severe)
        self._end()
        if self.selection.started:
            exchange.reader.broken(502, reason)
        else:
            self._again()

    def _again(self) -> None:
        exchange, gateway = self.exchange, self.exchange.gateway
        if not exchange.reader.gone:
            exchange.go(exchange.attempts.next(gateway._timeline.now, gateway._draw.random()))

    def _end(self) -> None:
        self._over = True
        gateway = self.exchange.gateway
        gateway._attempts[self._worker.url].pop(self, None)
        gateway._by_request.pop(self.exchange.spec.request_id, None)
        self.selection.release()
