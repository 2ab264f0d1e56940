"""The prefill side of transfers: yields jobs of decode workers, and sends the blocks that the engine computed."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.config.logs import ACCESS_LOGGER, one_word
from fd_core.disagg.connectors.contract import MAX_REFERENCE_BYTES, Bytes, Connector, KVOutbox
from fd_core.disagg.kv_compatibility import KVCompatibility, difference
from fd_core.disagg.lease import Action, PrefillEnd, SendMessage, SendPiece, requested_pieces
from fd_core.disagg.messages import MAX_TEXT, AbortLease, Confirm, FromDecode, FromPrefill, Open, Refuse
from fd_core.disagg.prefill.connections import DecodeConnections
from fd_core.disagg.prefill.lease import PrefillLease
from fd_core.disagg.stats import SenderStats
from fd_core.disagg.transfer import ENGINE_ENDS, KVTransfer
from fd_core.disagg.wire import Wire
from fd_core.effects.operations import (
    AbandonLease,
    Cancel,
    ChangeTransfers,
    Effect,
    LeaseEnded,
    PrefillJobArrived,
    PrefillTraced,
    Send,
    Sent,
)
from fd_core.effects.pending import PendingOperations
from fd_core.effects.port import CompletionQueue
from fd_core.effects.thread_loop import ThreadLoop
from fd_core.errors import FdError
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.envelope import Envelope
from fd_core.ops.contract import KVCache
from fd_core.types import IntArray, PrefillTrace
from fd_core.types.metrics import one_more

access_log = logging.getLogger(ACCESS_LOGGER)

_BROKE_OFF: Final = "the prefill worker aborted the lease"
_STUCK_SECONDS: Final = 70.0
"""Upper bound of the thread's sleep."""
_AT_ONCE: Final = 8
"""Blocks that are copied to the host in one call, before messages are read again."""
_REMEMBERED: Final = 4096
"""Number of ended leases that are remembered, so that a delayed duplicate of an `Open` does not reopen one."""


@dataclass(slots=True, eq=False)
class _PrefillSide:
    name: str
    opening: Open
    pieces: range
    machine: PrefillLease
    outbox: KVOutbox
    route: bytes
    """Socket's routing id of the connection on which the decode side last sent a message."""
    began: float
    sources: dict[int, tuple[int, IntArray]] = field(default_factory=dict)
    """Operation and block by index, for pieces not copied yet."""
    offered: set[int] = field(default_factory=set)
    """Indices that were among `sources` at some time."""
    uncopied: dict[int, int] = field(default_factory=dict)
    """Number of blocks not copied yet, by operation."""
    to_copy: deque[int] = field(default_factory=deque)


class Sender(KVTransfer[SenderStats, _PrefillSide]):
    """Takes leases of decode workers and sends them the blocks that the engine computes.

    A lease that is accepted arrives as `PrefillJobArrived`; if it is over before its job is done, `LeaseEnded` follows.
    Every `Send` completes with one `Sent` when its blocks were copied to the host or its lease is over; the blocks are
    not read afterwards.
    """

    performs = (Send, AbandonLease, ChangeTransfers)

    def __init__(
        self,
        cache: KVCache,
        block: BlockFormat,
        compatibility: KVCompatibility,
        envelope: Envelope,
        make_connector: Callable[[str], Connector],
        queue: CompletionQueue,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_leases: int,
        max_tokens: int,
        images: bool = False,
        longest: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        make_loop: Callable[..., ThreadLoop] = ThreadLoop,
        listen: Callable[..., DecodeConnections] = DecodeConnections,
    ) -> None:
        """Listen at `host:port`, 0 for any free port, and start the thread. Raises `ConfigError` if it cannot listen.

        `cache` supports `export_blocks` from that thread at any time. `make_connector` makes the connector of a name or
        raises an `FdError`. It is called on that thread, once per known name, and its connectors are closed with the
        sender. `listen` makes links for loops of `make_loop`.
        """
        super().__init__(
            "fdcore-kv-sender",
            queue,
            SenderStats(),
            compatibility,
            clock,
            stuck_seconds=_STUCK_SECONDS,
            make_loop=make_loop,
        )
        self._cache = cache
        self._wire = Wire(envelope, block, max_tokens=max_tokens, images=images)
        self._refusal = ""
        self._make_connector = make_connector
        self._max_leases = max_leases
        self._longest = longest
        self._pending: PendingOperations[Sent] = PendingOperations(queue.put)
        self._over: OrderedDict[str, None] = OrderedDict()
        self._asked_at = clock()
        """Time at which the engine last polled completions: an engine whose loop stopped computes nothing."""
        self._connections = listen(
            self._loop, self._wire, self._stats, host, port, on_message=self._on_message, on_reject=self._reject_invalid
        )
        self.port = self._connections.port
        self._loop.start()

    # The engine's thread ----------------------------------------------------------------------------------

    def perform(self, effects: Iterable[Effect]) -> None:
        """Begin and cancel sends, and end leases."""
        for effect in effects:
            match effect:
                case Send(operation):
                    self._watch(len(self._pending))
                    self._pending.begin(Sent(operation))
                    if not self._loop.post(partial(self._send, effect)):
                        self._pending.end(operation)
                case AbandonLease():
                    self._loop.post(partial(self._abandon, effect))
                case ChangeTransfers():
                    self._loop.post(partial(self._change, effect))
                case Cancel(operation):
                    if self._pending.end(operation):
                        self._loop.post(partial(self._cancel, operation))

    def tend(self) -> None:
        """Record that the engine polls; without polls, no `Heartbeat` is sent to decode workers."""
        self._asked_at = self._clock()
        self._watch(len(self._pending))

    def stats(self) -> SenderStats:
        """Return counters and gauges."""
        return msgspec.structs.replace(self._stats, open_leases=len(self._leases))

    def _complete_all(self, reason: str) -> None:
        for operation in self._pending.numbers():
            self._pending.end(operation)

    # Leases, on the sender's thread -----------------------------------------------------------------------

    def _on_message(self, route: bytes, message: FromDecode) -> None:
        name = message.lease
        lease = self._leases.get(name)
        if lease is not None:
            lease.route = route
            if isinstance(message, Confirm):
                self._stats.seconds += self._clock() - lease.began
            self._act(lease, lease.machine.receive(message, self._clock()))
        elif isinstance(message, Open) and name not in self._over:
            self._open(route, message)
        else:
            self._stats.late_messages += 1
            if not isinstance(message, AbortLease | Confirm):
                self._connections.send(route, AbortLease(name, "the prefill worker has no such lease"))

    def _open(self, route: bytes, opening: Open) -> None:
        name = opening.job.lease
        sentence = difference(self._compatibility, opening.compatibility)
        if sentence is not None:
            self._reject(route, name, "terms", reason=sentence)
            return
        if self._refusal:
            self._reject(route, name, "engine", reason=self._refusal)
            return
        if len(self._leases) >= self._max_leases:
            self._reject(route, name, "busy", reason=f"the prefill worker is at its limit of {self._max_leases} leases")
            return
        try:
            connector = self._connectors.get(opening.connector)
            if connector is None:
                connector = self._connectors[opening.connector] = self._make_connector(opening.connector)
            outbox = connector.open_outbox(
                name, opening.address, window=opening.window, value_bytes=self._wire.value_bytes
            )
        except Exception as error:  # noqa: BLE001 - a plugin's connector: any exception is a failed call
            self._failed("connector", "open_outbox", error)
            reason = f": {error}" if isinstance(error, FdError) else ""
            reason = f"the prefill worker cannot use the connector {opening.connector}{reason}"
            self._reject(route, name, "connector", reason=reason)
            return
        now = self._clock()
        machine = PrefillLease(opening, longest=self._longest, now=now)
        lease = self._leases[name] = _PrefillSide(name, opening, requested_pieces(opening), machine, outbox, route, now)
        self._due = min(self._due, machine.next_tick)
        self._stats.leases += 1
        self._queue.put(PrefillJobArrived(opening.job))
        # Last, because a disconnected decode worker ends the lease.
        self._act(lease, machine.accept(now))

    def _change(self, effect: ChangeTransfers) -> None:
        super()._change(effect)
        self._refusal = effect.refusal
        for lease in list(self._leases.values()):
            self._act(lease, lease.machine.failed(effect.refusal or "the prefill worker has changed its weights"))

    def _reject_invalid(self, route: bytes, lease: str, reason: str) -> None:
        if lease not in self._leases:
            self._reject(route, lease, "malformed", reason=reason)

    def _reject(self, route: bytes, lease: str, kind: str, reason: str) -> None:
        self._stats.refused = one_more(self._stats.refused, kind)
        self._connections.send(route, Refuse(lease, reason))

    def _send(self, effect: Send) -> None:
        operation = effect.operation
        lease = self._leases.get(effect.lease)
        if lease is None:
            self._pending.end(operation)
            return
        if operation not in self._pending:  # cancelled before it arrived here
            self._act(lease, lease.machine.failed(_BROKE_OFF))
            return
        for at in range(len(effect.blocks)):
            index = effect.first + at
            if index in lease.pieces and index not in lease.offered:
                lease.offered.add(index)
                lease.sources[index] = operation, effect.blocks[at : at + 1]
                lease.uncopied[operation] = lease.uncopied.get(operation, 0) + 1
        self._act(lease, lease.machine.ready(effect.first, len(effect.blocks)))
        if effect.tokens is not None:
            self._act(lease, lease.machine.finished(effect.tokens, effect.cached, self._clock()))
        if operation not in lease.uncopied:
            self._pending.end(operation)

    def _abandon(self, effect: AbandonLease) -> None:
        lease = self._leases.get(effect.lease)
        if lease is None:
            return
        if effect.refused:
            self._stats.refused = one_more(self._stats.refused, "engine")
            self._act(lease, lease.machine.refuse(effect.reason))
        else:
            self._act(lease, lease.machine.abandon(effect.reason or _BROKE_OFF))

    def _cancel(self, operation: int) -> None:
        """End the lease of a send that was completed without being performed."""
        for lease in list(self._leases.values()):
            if operation in lease.uncopied:
                self._act(lease, lease.machine.failed(_BROKE_OFF))

    def _act(self, lease: _PrefillSide, actions: Sequence[Action], frames: Sequence[Bytes] = ()) -> None:
        unheard = False
        for action in actions:
            match action:
                case SendMessage(message):
                    unheard |= not self._connections.send(lease.route, cast("FromPrefill", message), frames)
                    frames = ()
                case SendPiece(index):
                    lease.to_copy.append(index)
                    self._copying[lease] = None
                case PrefillEnd():
                    self._end(lease, action)
        if unheard:
            self._act(lease, lease.machine.failed("the decode worker disconnected"))

    def _end(self, lease: _PrefillSide, end: PrefillEnd) -> None:
        name = lease.name
        del self._leases[name]
        self._over[name] = None
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        self._stats.ended = one_more(self._stats.ended, end.end)
        job, seconds = lease.opening.job, self._clock() - lease.began
        self._log(lease.opening, end.end, seconds)
        if job.traceparent:
            self._queue.put(PrefillTraced(PrefillTrace(job.traceparent, time.time(), seconds, job.num_tokens, end.end)))
        lease.to_copy.clear()
        lease.sources.clear()
        for operation in list(lease.uncopied):
            self._pending.end(operation)
        lease.uncopied.clear()
        self._close_end(lease.outbox)
        if end.abort:
            self._queue.put(LeaseEnded(name))

    @staticmethod
    def _log(opening: Open, ended: str, seconds: float) -> None:
        """Write an access log line, so that both workers log the prompt under its request id."""
        request_id, tokens = one_word(opening.request_id, MAX_TEXT) or "-", opening.job.num_tokens
        fields = {"prefill": ended, "seconds": round(seconds, 6), "tokens_in": tokens, "request_id": request_id}
        access_log.info("prefill %s %.3f s in=%d id=%s", ended, seconds, tokens, request_id, extra={"fields": fields})

    def _tick(self, lease: _PrefillSide, now: float) -> None:
        self._act(lease, lease.machine.tick(now, working=now - self._asked_at < lease.opening.idle_timeout))

    def _copy(self, lease: _PrefillSide) -> None:
        operation, _ = lease.sources[lease.to_copy[0]]
        taken: list[tuple[int, IntArray]] = []
        while lease.to_copy and len(taken) < _AT_ONCE and lease.sources[lease.to_copy[0]][0] == operation:
            index = lease.to_copy.popleft()
            taken.append((index, lease.sources.pop(index)[1]))
        arrays = self._export(operation, np.concatenate([block for _, block in taken]))
        lease.uncopied[operation] -= len(taken)
        if not lease.uncopied[operation]:
            del lease.uncopied[operation]
            self._pending.end(operation)
        if arrays is None:
            self._act(lease, lease.machine.failed("the prefill worker could not read a block"))
            return
        for (index, _), array in zip(taken, arrays, strict=True):
            try:
                digest, parts = self._wire.seal_piece(lease.name, index, array)
                reference, frames = lease.outbox.put(index, parts)
                if len(reference) > MAX_REFERENCE_BYTES:
                    raise ValueError("a reference is too long")
            except Exception as error:  # noqa: BLE001 - a plugin's connector: any exception is a failed call
                self._failed("connector", "put", error)
                self._act(lease, lease.machine.failed("the connector could not send a piece"))
                return
            self._stats.pieces += 1
            self._stats.bytes += self._wire.payload_bytes
            self._act(lease, lease.machine.put(index, digest, reference, self._clock()), frames)
            if lease.machine.ended is not None:
                return

    def _export(self, operation: int, blocks: IntArray) -> npt.NDArray[Any] | None:
        if not self._pending.begin_copy(operation):
            return None
        try:
            return np.ascontiguousarray(self._cache.export_blocks(blocks))
        except Exception as error:  # noqa: BLE001 - a backend's cache: what it cannot copy is not sent
            self._failed("cache", "export_blocks", error)
            return None
        finally:
            self._pending.end_copy(operation)

    def _end_all(self) -> None:
        try:
            for lease in list(self._leases.values()):
                self._act(lease, lease.machine.abandon("the prefill worker is shutting down"))
        finally:
            self._complete_all(ENGINE_ENDS)
            self._connections.close()
