"""Decode side of transfers: completes fetches with prompts that prefill workers computed; no call blocks."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, cast

import msgspec

from fd_core.disagg.connectors.contract import Bytes, Connector, KVInbox
from fd_core.disagg.decode.connections import PrefillConnections, PrefillLink
from fd_core.disagg.decode.lease import DecodeLease
from fd_core.disagg.kv_compatibility import KVCompatibility
from fd_core.disagg.lease import MAX_WINDOW, Action, DecodeEnd, SendMessage, TakePiece, requested_pieces
from fd_core.disagg.messages import AbortLease, FromDecode, FromPrefill, KVPiece, Open, Refuse
from fd_core.disagg.stats import ReceiverStats
from fd_core.disagg.transfer import ENGINE_ENDS, KVTransfer
from fd_core.disagg.wire import InvalidMessage, Wire
from fd_core.effects.operations import Cancel, ChangeTransfers, Effect, Fetch, Fetched
from fd_core.effects.pending import PendingOperations
from fd_core.effects.port import CompletionQueue
from fd_core.effects.thread_loop import ThreadLoop
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.envelope import Damaged, Envelope
from fd_core.ops.contract import KVCache
from fd_core.types import PrefillOutcome
from fd_core.types.metrics import one_more

_log = logging.getLogger(__name__)

_GRACE_SECONDS: Final = 1.0
"""Time for the thread to end an expired lease. If it does not, it is stuck in a call."""
_LONGEST_ID: Final = 256
"""Characters of a request's name that are sent to the prefill side."""
_EXPECTED: Final = frozenset({"transferred", "held", "aborted"})
"""Outcomes that are not logged."""


@dataclass(slots=True, eq=False)
class _DecodeSide:
    effect: Fetch
    name: str
    opening: Open
    machine: DecodeLease
    inbox: KVInbox
    peer: PrefillLink
    began: float
    last_copy: float
    to_copy: deque[tuple[KVPiece, Sequence[Bytes]]] = field(default_factory=deque)


class Receiver(KVTransfer[ReceiverStats, _DecodeSide]):
    """Opens leases at prefill workers and copies the KV that they send; completes every `Fetch` within `longest`
    seconds."""

    performs = (Fetch, ChangeTransfers)

    def __init__(
        self,
        cache: KVCache,
        block: BlockFormat,
        compatibility: KVCompatibility,
        envelope: Envelope,
        connector: Connector,
        queue: CompletionQueue,
        *,
        window: int = 8,
        idle_timeout: float = 10.0,
        longest: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        make_loop: Callable[..., ThreadLoop] = ThreadLoop,
        connect: Callable[..., PrefillConnections] = PrefillConnections,
        name_lease: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        """Start the thread.

        `cache` supports `import_blocks` from that thread at any time. `window` pieces of a lease may be in flight at
        once; after `idle_timeout` seconds without a message from a prefill worker its leases expire. The connector is
        closed with the receiver. `connect` creates links for loops of `make_loop`, `name_lease` 32 hexadecimal digits
        that no receiver ever used for a lease before.
        """
        if not 1 <= window <= MAX_WINDOW:
            raise ValueError(f"expected a window of 1 to {MAX_WINDOW} pieces, got {window}")
        super().__init__(
            "fdcore-kv-receiver",
            queue,
            ReceiverStats(),
            compatibility,
            clock,
            stuck_seconds=idle_timeout + _GRACE_SECONDS,
            make_loop=make_loop,
        )
        self._cache = cache
        self._wire = Wire(envelope, block)
        self._connector = connector
        self._connectors[connector.name] = connector
        self._window = window
        self._idle_timeout = idle_timeout
        self._longest = longest
        self._accounting = threading.Lock()
        self._pending: PendingOperations[Fetched] = PendingOperations(queue.put)
        self._names: dict[int, str] = {}
        """Leases by operation."""
        self._name_lease = name_lease
        self._connections = connect(
            self._loop,
            self._wire,
            self._stats,
            on_message=self._on_message,
            reopen=self._reopen,
            on_disconnect=self._on_disconnect,
        )
        self._loop.start()

    # The engine's thread ----------------------------------------------------------------------------------

    def perform(self, effects: Iterable[Effect]) -> None:
        """Begin fetches and cancel others."""
        for effect in effects:
            match effect:
                case Fetch():
                    self._begin(effect)
                case ChangeTransfers():
                    self._loop.post(partial(self._change, effect))
                case Cancel(operation):
                    if self._complete(Fetched(operation, "aborted", reason="the request was aborted")):
                        self._loop.post(partial(self._abort, operation))

    def tend(self) -> None:
        """Complete the fetches that are past their deadline."""
        for fetched in self._pending.expire(self._clock()):
            self._account(fetched)
            self._loop.post(partial(self._abort, fetched.operation))
        self._watch(len(self._pending))

    def stats(self) -> ReceiverStats:
        """Return counters and gauges."""
        return msgspec.structs.replace(self._stats, open_leases=len(self._pending), peers=len(self._connections))

    def _begin(self, effect: Fetch) -> None:
        self._watch(len(self._pending))
        now, operation = self._clock(), effect.operation
        too_late = Fetched(operation, "expired", reason="the transfer timed out")
        self._pending.begin(too_late, now + self._longest + _GRACE_SECONDS)
        if not len(effect.blocks):
            self._complete(Fetched(operation, "held"))
        elif not self._loop.post(partial(self._open, effect, now)):
            self._complete(Fetched(operation, "aborted", reason=ENGINE_ENDS))

    # Completions, on either thread ------------------------------------------------------------------------

    def _complete(self, fetched: Fetched) -> bool:
        completed = self._pending.finish(fetched)
        if completed:
            self._account(fetched)
        return completed

    def _complete_all(self, reason: str) -> None:
        outcome: PrefillOutcome = "aborted" if reason == ENGINE_ENDS else "expired"
        for operation in self._pending.numbers():
            self._complete(Fetched(operation, outcome, reason=reason))
            self._loop.post(partial(self._abort, operation))

    def _account(self, fetched: Fetched) -> None:
        with self._accounting:
            self._stats.outcomes = one_more(self._stats.outcomes, fetched.outcome)
            self._stats.seconds += fetched.seconds if fetched.outcome == "transferred" else 0.0
        if fetched.outcome not in _EXPECTED:
            self._logger.warn(
                f"transfer from a prefill worker: {fetched.outcome} ({fetched.reason}); the prompt is computed here"
            )

    # Leases, on the receiver's thread ---------------------------------------------------------------------

    def _open(self, effect: Fetch, began: float) -> None:
        operation = effect.operation
        if operation not in self._pending:
            return
        name = self._name_lease()
        opening = Open(
            job=msgspec.structs.replace(effect.job, lease=name),
            compatibility=self._compatibility,
            window=self._window,
            idle_timeout=self._idle_timeout,
            connector=self._connector.name,
            address=b"",
            request_id=effect.request_id[:_LONGEST_ID],
        )
        pieces = requested_pieces(opening)
        if len(pieces) != len(effect.blocks):
            _log.error("operation %d has %d blocks for %d pieces", operation, len(effect.blocks), len(pieces))
            self._complete(Fetched(operation, "aborted", reason="the number of its blocks does not match its tokens"))
            return
        window = min(self._window, len(pieces))
        try:
            inbox = self._connector.open_inbox(name, pieces=pieces, window=window, value_bytes=self._wire.value_bytes)
        except Exception as error:  # noqa: BLE001 - a plugin's connector: any exception is a failed call
            self._failed("connector", "open_inbox", error)
            self._complete(Fetched(operation, "lost", reason="the connector could not open this worker's end"))
            return
        opening = msgspec.structs.replace(opening, window=window, address=inbox.address)
        try:
            self._wire.check(opening)
            peer = self._connections.get(effect.peer)
        except (InvalidMessage, ValueError) as error:
            self._close_end(inbox)
            outcome: PrefillOutcome = "refused" if isinstance(error, InvalidMessage) else "lost"
            self._complete(Fetched(operation, outcome, reason=str(error)))
            return
        machine = DecodeLease(opening, longest=self._longest, now=self._clock())
        self._leases[name] = _DecodeSide(effect, name, opening, machine, inbox, peer, began, began)
        self._names[operation] = name
        self._due = min(self._due, machine.next_tick)
        peer.leases.add(name)
        peer.send(opening)

    def _abort(self, operation: int) -> None:
        lease = self._leases.get(self._names.get(operation, ""))
        if lease is not None:
            self._act(lease, lease.machine.abort())

    def _on_message(self, peer: PrefillLink, message: FromPrefill, values: Sequence[Bytes]) -> None:
        lease = self._leases.get(message.lease)
        if lease is not None and lease.peer is peer:
            self._act(lease, lease.machine.receive(message, self._clock()), values)
            return
        self._stats.late_messages += 1
        if not isinstance(message, AbortLease | Refuse):
            peer.send(AbortLease(message.lease, "the lease is over"))

    def _reopen(self, name: str) -> None:
        lease = self._leases[name]
        lease.peer.send(lease.opening)

    def _on_disconnect(self, name: str, reason: str) -> None:
        lease = self._leases[name]
        self._act(lease, lease.machine.disconnected(reason))

    def _act(self, lease: _DecodeSide, actions: Sequence[Action], values: Sequence[Bytes] = ()) -> None:
        for action in actions:
            match action:
                case SendMessage(message):
                    lease.peer.send(cast("FromDecode", message))
                case TakePiece(piece):
                    lease.to_copy.append((piece, values))
                    self._copying[lease] = None
                case DecodeEnd(outcome, reason):
                    self._end(lease, outcome, reason)

    def _end(self, lease: _DecodeSide, outcome: PrefillOutcome, reason: str) -> None:
        del self._leases[lease.name], self._names[lease.effect.operation]
        lease.to_copy.clear()
        lease.peer.leases.discard(lease.name)
        now = lease.peer.idle_since = self._clock()
        self._due = min(self._due, now)  # the connection may be idle from now on
        self._close_end(lease.inbox)
        seconds = max(0.0, lease.last_copy - lease.began)
        self._complete(Fetched(lease.effect.operation, outcome, lease.machine.cached, seconds=seconds, reason=reason))

    def _tick(self, lease: _DecodeSide, now: float) -> None:
        self._act(lease, lease.machine.tick(now))

    def _copy(self, lease: _DecodeSide) -> None:
        piece, values = lease.to_copy.popleft()
        try:
            value = lease.inbox.take(piece.index, piece.reference, values)
        except Exception as error:  # noqa: BLE001 - a plugin's connector: any exception is a failed call
            self._failed("connector", "take", error)
            self._act(lease, lease.machine.spoiled(piece.index, "the connector could not take it"))
            return
        failure = self._import(lease, piece, value)
        del value
        try:
            lease.inbox.done(piece.index, piece.reference)
        except Exception as error:  # noqa: BLE001 - a plugin's connector, too
            self._failed("connector", "done", error)
            failure = failure or "the connector could not free its buffer"
        if failure is not None:
            self._act(lease, lease.machine.spoiled(piece.index, failure))
            return
        now = lease.last_copy = self._clock()
        self._stats.pieces += 1
        self._stats.bytes += self._wire.payload_bytes
        self._act(lease, lease.machine.copied(piece.index, piece.digest, now))

    def _import(self, lease: _DecodeSide, piece: KVPiece, value: Bytes) -> str | None:
        effect = lease.effect
        try:
            digest, array = self._wire.open_piece(lease.name, piece.index, value)
        except (Damaged, TypeError, ValueError) as error:
            return f"damaged ({error.reason})" if isinstance(error, Damaged) else "the connector returned no value"
        if digest != piece.digest:
            return "damaged (wrong piece)"
        if not self._pending.begin_copy(effect.operation):
            return "nobody waits for it any more"
        at = piece.index - effect.job.held_blocks
        try:
            self._cache.import_blocks(effect.blocks[at : at + 1], array[None])
        except Exception as error:  # noqa: BLE001 - a backend's cache: what it cannot copy was not transferred
            self._failed("cache", "import_blocks", error)
            return "it could not be copied to the device"
        finally:
            self._pending.end_copy(effect.operation)
        return None

    def _tidy(self, now: float) -> float:
        return self._connections.tidy(now)

    def _end_all(self) -> None:
        try:
            for lease in list(self._leases.values()):
                self._act(lease, lease.machine.abort())
        finally:
            self._complete_all(ENGINE_ENDS)
            self._connections.close()
