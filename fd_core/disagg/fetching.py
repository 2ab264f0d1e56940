"""The leases of a decode worker, on the one thread that owns their connections, inboxes and copies."""

from __future__ import annotations

import logging
import math
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from fd_core.disagg.answers import Answers
from fd_core.disagg.connections import Connections
from fd_core.disagg.connectors.contract import Bytes, Connector, Inbox
from fd_core.disagg.decode_lease import DecodeLease
from fd_core.disagg.lease import Action, DecodeEnd, Say, Take, wanted
from fd_core.disagg.loop import Loop
from fd_core.disagg.messages import Abort, FromDecode, FromPrefill, Open, Piece, Refuse
from fd_core.disagg.peer import Peer
from fd_core.disagg.stats import Tally
from fd_core.disagg.terms import Terms
from fd_core.disagg.wire import Unfit, Wire
from fd_core.kv.effects import Fetch, Fetched, Outcome
from fd_core.kv.stores.envelope import Damaged
from fd_core.ops.contract import KVCache

__all__ = ["Fetching"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Lease:
    effect: Fetch
    machine: DecodeLease
    opening: Open
    inbox: Inbox
    peer: Peer
    began: float
    last_copy: float
    takes: deque[tuple[Piece, Sequence[Bytes]]] = field(default_factory=deque)


class Fetching:
    """Performs what the machines of all open leases ask for."""

    def __init__(
        self,
        cache: KVCache,
        wire: Wire,
        terms: Terms,
        connector: Connector,
        answers: Answers[Fetched],
        tally: Tally,
        *,
        window: int,
        silence: float,
        longest: float,
        clock: Callable[[], float],
    ) -> None:
        self.loop = Loop("fdcore-kv-receiver", self._turn, self._end_all)
        self.connections = Connections(
            self.loop, wire, tally, hear=self._hear, begin=self._begin_again, gone=self._gone
        )
        self._cache = cache
        self._wire = wire
        self._terms = terms
        self._connector = connector
        self._answers = answers
        self._tally = tally
        self._window = window
        self._silence = silence
        self._longest = longest
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._lease_of: dict[int, str] = {}
        self._work: deque[_Lease] = deque()
        """Leases with pieces to take; each takes one before it is the next one's turn."""
        self._due = math.inf
        """Nothing has to be done for its time's sake before."""

    def open(self, effect: Fetch, began: float) -> None:
        """Begin a fetch."""
        number = effect.operation
        if number not in self._answers:
            return
        opening = Open(
            job=msgspec.structs.replace(effect.job, lease=secrets.token_hex(16)),
            terms=self._terms,
            window=self._window,
            silence=self._silence,
            connector=self._connector.name,
            address=b"",
        )
        pieces = wanted(opening)
        if len(pieces) != len(effect.blocks):
            _log.error("operation %d has %d blocks for %d pieces", number, len(effect.blocks), len(pieces))
            self._answer(effect, "aborted", "its blocks do not fit its tokens", began, began)
            return
        window = min(self._window, len(pieces))
        try:
            inbox = self._connector.open_inbox(
                opening.lease, pieces=pieces, window=window, value_bytes=self._wire.value_bytes
            )
        except Exception as error:  # noqa: BLE001 - a stranger's connector: whatever it raises is a failed call
            self._tally.error("connector", "open_inbox", error)
            self._answer(effect, "lost", "the connector could not open this worker's end", began, began)
            return
        opening = msgspec.structs.replace(opening, window=window, address=inbox.address)
        try:
            self._wire.seal_from_decode(opening)
            peer = self.connections.get(effect.peer)
        except (Unfit, ValueError) as error:
            self._close_inbox(inbox)
            self._answer(effect, "refused" if isinstance(error, Unfit) else "lost", str(error), began, began)
            return
        machine = DecodeLease(opening, pieces, longest=self._longest)
        lease = _Lease(effect, machine, opening, inbox, peer, began, began)
        self._leases[opening.lease] = lease
        self._lease_of[number] = opening.lease
        peer.leases.add(opening.lease)
        self._act(lease, machine.begin(self._clock()))

    def abort(self, operation: int) -> None:
        """End the lease of an operation, if it has one."""
        lease = self._leases.get(self._lease_of.get(operation, ""))
        if lease is not None:
            self._act(lease, lease.machine.abort(self._clock()))

    # What prefill workers say -----------------------------------------------------------------------------

    def _hear(self, peer: Peer, message: FromPrefill, values: Sequence[Bytes]) -> None:
        lease = self._leases.get(message.lease)
        if lease is not None and lease.peer is peer:
            self._act(lease, lease.machine.heard(message, self._clock()), values)
            return
        self._tally.add("late_messages")
        if not isinstance(message, Abort | Refuse):
            self.connections.say(peer, Abort(message.lease, "the lease is over"))

    def _begin_again(self, name: str) -> None:
        self.connections.say(self._leases[name].peer, self._leases[name].opening)

    def _gone(self, name: str, reason: str) -> None:
        self._act(self._leases[name], self._leases[name].machine.gone(reason, self._clock()))

    # Leases -----------------------------------------------------------------------------------------------

    def _act(self, lease: _Lease, actions: Sequence[Action], values: Sequence[Bytes] = ()) -> None:
        for action in actions:
            match action:
                case Say(message):
                    self.connections.say(lease.peer, cast("FromDecode", message))
                case Take(piece):
                    if not lease.takes:
                        self._work.append(lease)
                    lease.takes.append((piece, values))
                case DecodeEnd(outcome, reason):
                    self._end(lease, outcome, reason)
        self._due = min(self._due, lease.machine.next_tick)

    def _end(self, lease: _Lease, outcome: Outcome, reason: str) -> None:
        name = lease.opening.lease
        del self._leases[name], self._lease_of[lease.effect.operation]
        lease.takes.clear()
        lease.peer.leases.discard(name)
        lease.peer.idle_since = self._clock()
        self._due = min(self._due, self.connections.tidy(lease.peer.idle_since))
        self._close_inbox(lease.inbox)
        self._answer(lease.effect, outcome, reason, lease.began, lease.last_copy, lease.machine.cached)

    def _answer(self, effect: Fetch, outcome: Outcome, reason: str, began: float, last: float, cached: int = 0) -> None:
        seconds = max(0.0, last - began)
        if self._answers.give(effect.operation, Fetched(effect.operation, outcome, cached, seconds, reason)):
            self._tally.add_labelled("outcomes", outcome)
            if outcome == "transferred":
                self._tally.add_seconds(seconds)

    def _close_inbox(self, inbox: Inbox) -> None:
        try:
            inbox.close()
        except Exception as error:  # noqa: BLE001 - a stranger's connector, which promises not to
            self._tally.error("connector", "close", error)

    # Turns ------------------------------------------------------------------------------------------------

    def _turn(self) -> float:
        """Take one piece and do what is due; return the seconds until there is more."""
        if self._work:
            lease = self._work.popleft()
            if lease.takes:
                piece, values = lease.takes.popleft()
                if lease.takes:
                    self._work.append(lease)
                self._take(lease, piece, values)
        now = self._clock()
        if now >= self._due:
            self._tick(now)
        return 0.0 if self._work else self._due - self._clock()

    def _tick(self, now: float) -> None:
        self._due = math.inf
        for lease in list(self._leases.values()):
            self._act(lease, lease.machine.tick(now) if lease.machine.next_tick <= now else ())
        self._due = min(self._due, self.connections.tidy(now))

    def _take(self, lease: _Lease, piece: Piece, values: Sequence[Bytes]) -> None:
        machine = lease.machine
        try:
            value = lease.inbox.take(piece.index, piece.reference, values)
        except Exception as error:  # noqa: BLE001 - a stranger's connector: whatever it raises is a failed call
            self._tally.error("connector", "take", error)
            self._act(lease, machine.spoiled(piece.index, "the connector could not take it", self._clock()))
            return
        flaw = self._copy(lease, piece, value)
        del value
        try:
            lease.inbox.done(piece.index, piece.reference)
        except Exception as error:  # noqa: BLE001 - likewise
            self._tally.error("connector", "done", error)
            flaw = flaw or "the connector could not free its place"
        now = self._clock()
        if flaw is not None:
            self._act(lease, machine.spoiled(piece.index, flaw, now))
            return
        lease.last_copy = now
        self._tally.add("pieces")
        self._tally.add("bytes", self._wire.payload_bytes)
        self._act(lease, machine.copied(piece.index, piece.digest, now))

    def _copy(self, lease: _Lease, piece: Piece, value: Bytes) -> str | None:
        """Check a value and copy it to its block; say what went wrong."""
        effect = lease.effect
        try:
            digest, array = self._wire.open_piece(lease.opening.lease, piece.index, value)
        except (Damaged, TypeError, ValueError) as error:
            return f"damaged ({error.reason})" if isinstance(error, Damaged) else "the connector returned no value"
        if digest != piece.digest:
            return "damaged (another piece)"
        if not self._answers.begin_copy(effect.operation):
            return "nobody waits for it any more"
        at = piece.index - effect.job.held_blocks
        try:
            self._cache.import_blocks(effect.blocks[at : at + 1], array[None])
        except Exception as error:  # noqa: BLE001 - a backend's cache: what it cannot copy was not transferred
            self._tally.error("cache", "import_blocks", error)
            return "it could not be copied to the device"
        finally:
            self._answers.end_copy()
        return None

    def _end_all(self) -> None:
        """Say that all is over, as the thread ends."""
        try:
            for lease in list(self._leases.values()):
                self._act(lease, lease.machine.abort(self._clock()))
        finally:
            for answer in self._answers.give_rest(lambda number: Fetched(number, "aborted", reason="the engine ends")):
                self._tally.add_labelled("outcomes", answer.outcome)
            self.connections.close()
