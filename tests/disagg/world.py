"""Two engines with leases between them, a scripted network, and the invariants of all that.

Every action of either side is checked as it happens, against global state that neither side can see.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fd_core.disagg.decode.lease import DecodeLease
from fd_core.disagg.kv_compatibility import KVCompatibility
from fd_core.disagg.lease import Action, DecodeEnd, PrefillEnd, SendMessage, SendPiece, TakePiece, requested_pieces
from fd_core.disagg.messages import (
    AbortLease,
    Accept,
    Commit,
    Confirm,
    Credit,
    FromDecode,
    FromPrefill,
    KVPiece,
    Open,
    Refuse,
)
from fd_core.disagg.prefill.lease import PrefillLease
from fd_core.types import PrefillJob

COMPATIBILITY = KVCompatibility(model="m", dtype="float32", block_size=2, num_layers=1, num_kv_heads=1, head_dim=4)
SILENCE = 8.0
LONGEST = 100.0


LAST_AT_DECODE: dict[str, tuple[type, ...]] = {
    "transferred": (Confirm,),
    **dict.fromkeys(["damaged", "expired", "aborted"], (AbortLease,)),
}
"""Last message of a lease, by its outcome."""
LAST_AT_PREFILL: dict[str, tuple[type, ...]] = {
    "refused": (Refuse,),
    **dict.fromkeys(["gave_up", "failed", "expired"], (AbortLease,)),
}


def opening(number: int, blocks: int, *, first: int = 0, window: int = 2, idle_timeout: float = SILENCE) -> Open:
    """Request `blocks` blocks from index `first` on; the last one is partial."""
    tokens = (first + blocks) * COMPATIBILITY.block_size - 1
    job = PrefillJob(bytes(4 * tokens), first, lease=f"{number:032x}")
    return Open(job, COMPATIBILITY, window, idle_timeout, "tcp", b"")


def content(lease: str, index: int) -> bytes:
    return f"{lease}/{index}".encode()


def seal(value: bytes, nonce: int) -> bytes:
    """Return a digest of 16 bytes; sealing the same value again yields another one."""
    return nonce.to_bytes(4, "little") + hashlib.blake2b(value, digest_size=12).digest()


@dataclass(frozen=True)
class Packet:
    to_decode: bool
    message: FromDecode | FromPrefill
    payload: bytes = b""


@dataclass
class Leased:
    """A lease at the decode side, with its blocks."""

    opening: Open
    lease: DecodeLease
    begun: float
    last_received: float
    taking: list[tuple[KVPiece, bytes]] = field(default_factory=list)
    blocks: dict[int, bytes] = field(default_factory=dict)
    wanted: bool = True
    """True until the decode side aborts it."""
    moved: float = math.inf
    """Time of the commit, or of the last copied piece since."""
    lost: bool = False
    """True if an `AbortLease` arrived or the connection was lost."""
    refused: bool = False


@dataclass
class Owed:
    """A lease at the prefill side, with the request that computes its prompt."""

    opening: Open
    lease: PrefillLease
    begun: float
    last_received: float
    moved: float
    """Time of the last piece sent or credit received."""
    accepted: bool = False
    computed: int = 0
    """Number of leading wanted blocks computed."""
    running: bool = True
    gave_up: bool = False
    broken: bool = False
    puts: list[int] = field(default_factory=list)
    issued: int = 0
    sent: int = 0
    credit: int = 0
    confirmed: bool = False
    aborted: bool = False

    @property
    def unfinished(self) -> bool:
        return self.running and self.computed < len(requested_pieces(self.opening))


class World:
    def __init__(self, *, longest: float = LONGEST) -> None:
        self.longest = longest
        self.now = 1000.0
        self.flying: list[Packet] = []
        self.arrived: list[Packet] = []
        self.decode: dict[str, Leased] = {}
        self.prefill: dict[str, Owed] = {}
        self.closed_decode: list[Leased] = []
        self.closed_prefill: list[Owed] = []
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.working = True
        self.refusing = False
        self.deciding = True
        self.tampered: set[str] = set()
        self.incarnations: dict[str, int] = defaultdict(int)
        self.nonce = 0
        self.number = 0

    # The decode side ---------------------------------------------------------------------------------------------

    def open(self, blocks: int, *, first: int = 0, window: int = 2, idle_timeout: float = SILENCE) -> str:
        self.number += 1
        message = opening(self.number, blocks, first=first, window=window, idle_timeout=idle_timeout)
        lease = DecodeLease(message, longest=self.longest, now=self.now)
        self.decode[message.lease] = Leased(message, lease, self.now, self.now)
        self.flying.append(Packet(False, message))
        return message.lease

    def at_decode(self, side: Leased, actions: list[Action]) -> None:
        """Perform the actions of a lease and check that they are allowed."""
        name = side.opening.lease
        for action in actions:
            assert self.decode.get(name) is side, "an action after the end"
            match action:
                case SendMessage(message=message):
                    assert message.lease == name
                    if isinstance(message, Credit):
                        assert message.taken == len(side.blocks)
                    self.flying.append(Packet(False, message))
                case DecodeEnd(outcome=outcome, reason=reason):
                    assert side.lease.outcome == outcome
                    assert (reason == "") == (outcome == "transferred")
                    assert sent_types(actions) == LAST_AT_DECODE.get(outcome, ())
                    self.outcomes[name], self.reasons[name] = outcome, reason
                    del self.decode[name]
                    self.closed_decode.append(side)
                    self.may_end(side, outcome)
                case _:
                    raise AssertionError(f"{action} is not for the decode side")
        assert (side.lease.outcome is None) == (self.decode.get(name) is side)

    def may_end(self, side: Leased, outcome: str) -> None:
        name = side.opening.lease
        if outcome == "transferred":
            assert side.blocks == {index: content(name, index) for index in requested_pieces(side.opening)}
            assert side.lease.cached == 1
        elif outcome == "expired":
            assert self.over(side)
        elif outcome == "damaged":
            assert name in self.tampered or self.incarnations[name] > 1
        else:
            assert {"aborted": not side.wanted, "lost": side.lost, "refused": side.refused}[outcome]

    def over(self, side: Leased) -> bool:
        """Return True if a lease exceeded its maximum, its silence timeout, or the wait for a piece sent earlier."""
        idle_timeout = side.opening.idle_timeout
        stuck = not side.taking and self.now >= side.moved + idle_timeout
        return stuck or self.now >= min(side.begun + self.longest, side.last_received + idle_timeout)

    def copy(self, side: Leased, which: int) -> None:
        """Check a received piece and write it to its block, unless the lease has ended."""
        piece, payload = side.taking.pop(which)
        if self.decode.get(side.opening.lease) is not side:
            digest = seal(payload, 0)
            assert side.lease.copied(piece.index, digest, self.now) == []
            assert side.lease.spoiled(piece.index, "late") == []
            return
        digest = seal(payload, int.from_bytes(piece.digest[:4], "little"))
        if digest != piece.digest:
            self.at_decode(side, side.lease.spoiled(piece.index, "the digest does not match"))
            assert side.lease.outcome == "damaged"
        else:
            side.blocks[piece.index] = payload
            if side.moved < math.inf:
                side.moved = self.now
            self.at_decode(side, side.lease.copied(piece.index, digest, self.now))

    def receive_at_decode(self, packet: Packet) -> None:
        message = packet.message
        assert isinstance(message, FromPrefill)
        for late in self.closed_decode:
            if late.opening.lease == message.lease:
                assert late.lease.receive(message, self.now) == []
        side = self.decode.get(message.lease)
        if side is None:
            if not isinstance(message, AbortLease | Refuse):
                self.flying.append(Packet(False, AbortLease(message.lease, "no such lease")))
            return
        side.last_received = self.now
        side.lost |= isinstance(message, AbortLease)
        side.refused |= isinstance(message, Refuse)
        if isinstance(message, Commit) and side.moved == math.inf:
            side.moved = self.now
        actions = side.lease.receive(message, self.now)
        if actions and isinstance(takes := actions[0], TakePiece):
            assert actions == [TakePiece(message)]
            assert side.lease.outcome is None
            assert takes.piece.index in requested_pieces(side.opening)
            assert takes.piece.index not in side.blocks
            assert takes.piece.index not in [piece.index for piece, _ in side.taking]
            side.taking.append((takes.piece, packet.payload))
            assert len(side.taking) <= side.opening.window
            return
        self.at_decode(side, actions)

    def abort(self, side: Leased) -> None:
        side.wanted = False
        self.at_decode(side, side.lease.abort())

    # The prefill side --------------------------------------------------------------------------------------------

    def at_prefill(self, side: Owed, actions: list[Action]) -> None:
        name = side.opening.lease
        for action in actions:
            assert self.prefill.get(name) is side, "an action after the end"
            match action:
                case SendMessage(message=message):
                    assert message.lease == name
                    if isinstance(message, Accept):
                        assert side.accepted
                    if isinstance(message, Commit):
                        assert not side.running and side.sent == len(requested_pieces(side.opening))
                    if not isinstance(message, KVPiece):  # `put` sends these with their payload
                        self.flying.append(Packet(True, message))
                case SendPiece(index=index):
                    assert (
                        requested_pieces(side.opening).start
                        <= index
                        < requested_pieces(side.opening).start + side.computed
                    )
                    side.puts.append(index)
                    side.issued += 1
                    assert side.issued - side.credit <= side.opening.window
                case PrefillEnd(end=end, abort=abort):
                    assert side.lease.ended == end
                    assert sent_types(actions) == LAST_AT_PREFILL.get(end, ())
                    assert abort == (side.running and not side.gave_up and end != "refused")
                    del self.prefill[name]
                    self.closed_prefill.append(side)
                    self.may_end_at_prefill(side, end)
                case _:
                    raise AssertionError(f"{action} is not for the prefill side")
        assert (side.lease.ended is None) == (self.prefill.get(name) is side)

    def may_end_at_prefill(self, side: Owed, end: str) -> None:
        idle_timeout = side.opening.idle_timeout
        if end == "confirmed":
            assert side.confirmed and self.outcomes[side.opening.lease] == "transferred"
        elif end == "expired":
            silent = self.now >= side.last_received + idle_timeout
            stuck = side.sent > side.credit and self.now >= side.moved + idle_timeout
            assert self.now >= side.begun + self.longest or silent or stuck
        else:
            why = {"aborted": side.aborted, "failed": side.broken, "gave_up": side.gave_up}
            assert why.get(end, end == "refused")

    def receive_at_prefill(self, packet: Packet) -> None:
        message = packet.message
        assert isinstance(message, FromDecode)
        for late in self.closed_prefill:
            if late.opening.lease == message.lease:
                assert late.lease.receive(message, self.now) == []
        side = self.prefill.get(message.lease)
        if side is None:
            if isinstance(message, Open):
                self.order(message)
            elif not isinstance(message, AbortLease | Confirm):
                self.flying.append(Packet(True, AbortLease(message.lease, "no such lease")))
            return
        side.last_received = self.now
        side.aborted |= isinstance(message, AbortLease)
        side.confirmed |= isinstance(message, Confirm)
        if isinstance(message, Credit) and min(message.taken, side.sent) > side.credit:
            side.credit = min(message.taken, side.sent)
            side.moved = self.now
        self.at_prefill(side, side.lease.receive(message, self.now))

    def order(self, message: Open) -> None:
        self.incarnations[message.lease] += 1
        lease = PrefillLease(message, longest=self.longest, now=self.now)
        side = self.prefill[message.lease] = Owed(message, lease, self.now, self.now, self.now)
        if self.deciding:
            self.decide(side)

    def decide(self, side: Owed) -> None:
        if self.refusing:
            self.at_prefill(side, side.lease.refuse("no room"))
            return
        side.accepted = True
        self.at_prefill(side, side.lease.accept(self.now))

    def compute(self, side: Owed, count: int) -> None:
        """Compute blocks of an accepted request; the last one finishes it."""
        pieces = requested_pieces(side.opening)
        if not (self.working and side.accepted and side.unfinished):
            return
        first = pieces.start + side.computed
        count = min(count, len(pieces) - side.computed)
        side.computed += count
        self.at_prefill(side, side.lease.ready(first, count))
        if side.computed == len(pieces):
            side.running = False
            self.at_prefill(side, side.lease.finished(side.opening.job.num_tokens, 1, self.now))

    def replay_computed(self, side: Owed) -> None:
        self.at_prefill(side, side.lease.ready(0, requested_pieces(side.opening).start + side.computed))

    def finish_early(self, side: Owed) -> None:
        """End an incomplete request as if it were complete."""
        side.running, side.gave_up = False, True
        self.at_prefill(side, side.lease.finished(side.opening.job.num_tokens, 0, self.now))
        assert side.lease.ended == "gave_up"

    def put(self, side: Owed, which: int) -> None:
        index = side.puts.pop(which)
        name = side.opening.lease
        self.nonce += 1
        value = content(name, index)
        digest = seal(value, self.nonce)
        if self.prefill.get(name) is not side:
            assert side.lease.put(index, digest, b"", self.now) == []
            return
        side.sent += 1
        side.moved = self.now
        actions = side.lease.put(index, digest, b"", self.now)
        assert actions[0] == SendMessage(KVPiece(name, index, digest, b""))
        self.flying.append(Packet(True, KVPiece(name, index, digest, b""), value))
        self.at_prefill(side, actions)

    def break_put(self, side: Owed, which: int) -> None:
        side.puts.pop(which)
        if self.prefill.get(side.opening.lease) is side:
            side.broken = True
            self.at_prefill(side, side.lease.failed("the connector failed"))
        else:
            assert side.lease.failed("the connector failed") == []

    def give_up(self, side: Owed) -> None:
        if side.running:
            side.gave_up = True
            self.at_prefill(side, side.lease.abandon("out of room"))

    # Crashes -----------------------------------------------------------------------------------------------------

    def crash_decode(self) -> None:
        """The decode side loses all state; later messages meet a worker without leases."""
        self.decode.clear()

    def crash_prefill(self) -> None:
        self.prefill.clear()

    # Network -----------------------------------------------------------------------------------------------------

    def deliver(self, which: int) -> None:
        packet = self.flying.pop(which)
        self.arrived.append(packet)
        if packet.to_decode:
            self.receive_at_decode(packet)
        else:
            self.receive_at_prefill(packet)

    def repeat(self, which: int) -> None:
        self.flying.append(self.arrived[which])

    def damage(self, which: int, *, sealed: bool) -> None:
        """Change the payload of a piece in flight, with a valid digest if `sealed`: a mix-up of the connector."""
        packet = self.flying[which]
        if not isinstance(packet.message, KVPiece):
            return
        payload = packet.payload + b"?"
        message = replace_digest(packet.message, payload) if sealed else packet.message
        self.tampered.add(message.lease)
        self.flying[which] = replace(packet, message=message, payload=payload)

    def cut(self) -> None:
        """The connection is lost with all messages in flight, and both sides are notified."""
        self.flying.clear()
        for leased in [*self.decode.values()]:
            leased.lost = True
            self.at_decode(leased, leased.lease.disconnected("disconnected"))
        for owed in [*self.prefill.values()]:
            owed.broken = True
            self.at_prefill(owed, owed.lease.failed("disconnected"))

    # Time --------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let every lease check the clock; one that is not due has nothing to do."""
        for leased in [*self.decode.values()]:
            due = self.now >= leased.lease.next_tick
            actions = leased.lease.tick(self.now)
            assert due or actions == []
            self.at_decode(leased, actions)
            expired = self.over(leased)
            assert leased.lease.outcome == ("expired" if expired else None)
            assert leased.lease.next_tick > self.now
            assert leased.lease.tick(self.now) == []
        for owed in [*self.prefill.values()]:
            due = self.now >= owed.lease.next_tick
            actions = owed.lease.tick(self.now, working=self.working)
            assert due or actions == []
            if not self.working and owed.running:
                assert [action for action in actions if isinstance(action, SendMessage)] == [] or owed.lease.ended
            self.at_prefill(owed, actions)
            idle_timeout = owed.opening.idle_timeout
            stuck = owed.sent > owed.credit and self.now >= owed.moved + idle_timeout
            expired = stuck or self.now >= min(owed.begun + self.longest, owed.last_received + idle_timeout)
            assert owed.lease.ended == ("expired" if expired else None)
            assert owed.lease.next_tick > self.now
            assert owed.lease.tick(self.now, working=self.working) == []

    def next_tick(self) -> float:
        return min(side.lease.next_tick for side in (*self.decode.values(), *self.prefill.values()))

    def wait(self, seconds: float, between: Callable[[], object] = lambda: None) -> None:
        """Let time pass as the driving threads do: they wake when a lease is due."""
        until = self.now + seconds
        while self.decode or self.prefill:
            if (due := self.next_tick()) > until:
                break
            self.now = max(self.now, due)
            self.tick()
            between()
        self.now = max(self.now, until)

    # Without faults ----------------------------------------------------------------------------------------------

    def go_on(self, rounds: int, *, compute: int = 1) -> None:
        """Run everything without faults and without delays."""
        for _ in range(rounds):
            for _ in range(len(self.flying)):
                self.deliver(0)
            for leased in [*self.decode.values()]:
                while leased.taking:
                    self.copy(leased, 0)
            for owed in [*self.prefill.values()]:
                if compute:
                    self.compute(owed, compute)
                while owed.puts:
                    self.put(owed, 0)

    def settle(self, *, compute: int = 1) -> None:
        """Run until no message is in flight."""
        for _ in range(1000):
            self.go_on(1, compute=compute)
            busy = any(leased.taking for leased in self.decode.values()) or any(
                owed.puts or (compute and self.working and owed.accepted and owed.unfinished)
                for owed in self.prefill.values()
            )
            if not (self.flying or busy):
                return
        raise AssertionError("the two sides never stop sending")


def sent_types(actions: list[Action]) -> tuple[type, ...]:
    return tuple(type(action.message) for action in actions if isinstance(action, SendMessage))


def replace_digest(piece: KVPiece, payload: bytes) -> KVPiece:
    return KVPiece(piece.lease, piece.index, seal(payload, 2**31), piece.reference)
