"""Network between pairs of a hostile world, with one kind of misbehaviour, and peers that forge messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from fd_core.disagg.messages import Commit, Credit, FromPrefill, Heartbeat, KVPiece, Open
from fd_core.simulation.clock.timeline import Network
from fd_core.simulation.clock.virtual_loop import VirtualThreads
from fd_core.simulation.storage.storage import Arrive, Message, TransferNetwork
from fd_core.types import Delta, RequestSpec
from tests.simulation.hostile.computing import BrokenLaw
from tests.simulation.hostile.leases import LeaseWatch
from tests.simulation.hostile.plans import PairPlan

__all__ = ["HARMLESS_HABITS", "HostileTransfers", "Stranger", "forged_ticket"]

HARMLESS_HABITS = frozenset({"", "first_words_lost", "late", "echo", "foreign_pieces", "old_credit"})
"""Habits under which every open lease can still be transferred."""
_ECHOES = (0.0, 0.05, 0.4, 1.5)
_TOGETHER = 0.06
"""Seconds for which pieces are held back, to arrive together."""

_Sent = tuple[Message, str, float]
"""Replacement message, kind of forgery if it ends the lease, and extra delay in seconds."""


class HostileTransfers(TransferNetwork):
    """Observed network between pairs, which treats messages according to the plan of the world."""

    def __init__(self, network: Network, plan: PairPlan, watch: LeaseWatch, seed: int, log: Callable[[str], None]):
        super().__init__(network)
        self.window, self.longest = plan.window, plan.longest
        self._habit = plan.habit
        self._every = plan.every
        self._watch = watch
        self._draw = random.Random(f"lies/{seed}")
        self._log = log
        self._lies: list[tuple[Message, str]] = []
        self._seen: set[tuple[str, object]] = set()
        self._just_lost: set[tuple[str, str]] = set()
        """Sender and lease of the last lost message."""
        self._chances = 0

    def received(self, worker: str, message: Message) -> None:
        lie = next((lie for forged, lie in self._lies if forged is message), "")
        self._log(f"{worker} receives {_short(message)}{' LIE ' + lie if lie else ''}")
        self._watch.on_received(worker, message[0], lie)

    def _leave(self, threads: VirtualThreads, origin: str, target: str, message: Message, arrive: Arrive) -> None:
        self._log(f"{origin} sends {_short(message)}")
        self._watch.on_sent(origin, message[0])
        self.num_sent += 1
        for each, lie, later in self._treated(origin, message):
            if lie:
                self._lies.append((each, lie))
            for seconds in self.fate(self.num_sent):
                threads.post_to_caller(
                    partial(self.network.send, origin, target, partial(arrive, each)), seconds + later
                )

    def _treated(self, origin: str, message: Message) -> Sequence[_Sent]:
        as_it_is = [(message, "", 0.0)]
        match self._habit:
            case "":
                return as_it_is
            case "first_words_lost":
                word, speaker = (origin, message[0]), (origin, message[0].lease)
                # After a silence a side may consider its peer dead, so no two messages in a row are lost.
                if isinstance(message[0], KVPiece) or word in self._seen or speaker in self._just_lost:
                    self._just_lost.discard(speaker)
                    return as_it_is
                self._seen.add(word)
                self._just_lost.add(speaker)
                return []
            case "echo":
                return as_it_is + [((message[0], message[1]), "", later) for later in _ECHOES]
            case "late":
                return [(message, "", self._draw.choice((0.0, 0.0, 0.02, 0.06)))]
        return [*self._lie(message)] or as_it_is

    def _lie(self, sent: Message) -> Iterator[_Sent]:
        """Yield replacements of a message; nothing if it is sent unchanged."""
        message, frames = sent
        match self._habit, message:
            case "foreign_pieces", KVPiece(index=index) if self._chance():
                opening = self._watch.leases[message.lease].opening
                held = opening.job.held_blocks
                for other in {held - 1, held - 2, index + 1000} - {-1, -2}:
                    yield (msgspec.structs.replace(message, index=other), frames), "", 0.0
                yield sent, "", 0.0
            case "damaged_pieces", KVPiece() if self._chance():
                parts = [bytes(frame) for frame in frames]
                parts[-1] = parts[-1][:-1] + bytes([parts[-1][-1] ^ 1])
                yield (message, parts), "damaged", 0.0
                yield sent, "", 0.02
            case "swapped_pieces", KVPiece(index=index) if self._chance():
                yield (msgspec.structs.replace(message, index=index + 1), frames), "damaged", 0.0
                yield sent, "", 0.0
            case "false_commits", Commit(tokens=tokens, digest=digest) if self._chance():
                more = self._draw.choice((-1, 1)) if tokens > 1 else 1
                changed = self._draw.choice(
                    ({"tokens": tokens + more}, {"digest": digest[::-1]}, {"digest": bytes(16)})
                )
                yield (msgspec.structs.replace(message, **changed), ()), "commit", 0.0
            case "early_commits", KVPiece(lease=lease) if self._chance():
                tokens = self._watch.leases[lease].opening.job.num_tokens
                yield (Commit(lease, tokens, bytes(16)), ()), "commit", 0.0
                yield sent, "", 0.0
            case "too_much_credit", Credit(lease=lease) | Heartbeat(lease=lease) if not isinstance(
                message, FromPrefill
            ):
                yield sent, "", 0.0
                yield (Credit(lease, 2**31 - 1), ()), "", 0.0
            case "too_much_credit", KVPiece():
                now = self.network._timeline.now
                yield sent, "", _TOGETHER - now % _TOGETHER
            case "old_credit", Credit(lease=lease, taken=taken):
                yield sent, "", 0.0
                yield (Credit(lease, taken // 2), ()), "", 0.0
                yield (Credit(lease, taken), ()), "", 0.0
            case "misfits", Open(compatibility=compatibility):
                field = self._draw.choice(compatibility.__struct_fields__)
                value = getattr(compatibility, field)
                other = value + 1 if isinstance(value, int) else f"{value}2"
                changed = msgspec.structs.replace(compatibility, **{field: other})
                yield (msgspec.structs.replace(message, compatibility=changed), ()), "", 0.0

    def _chance(self) -> bool:
        self._chances += 1
        return self._chances % self._every == 0


def forged_ticket(spec: RequestSpec, number: int) -> RequestSpec:
    """Return the ticket of an attacker who has seen that of a request and has a different address."""
    name, (peer, mac) = spec.request_id, spec.prefill_at.split(";")
    name, ticket = (
        (f"{name[:-1]}~", f"{peer};{mac}"),
        (f"{name}/y", f"{peer};{'0' * 64}"),
        (f"{name}{peer[0]}", f"{peer[1:]};{mac}"),
        (f"{name}", f"a{peer};{mac}"),
    )[number % 4]
    return msgspec.structs.replace(spec, request_id=name, prefill_at=ticket)


class Stranger:
    """Reader of a request with a forged ticket, which must not be answered."""

    def answered(self, delta: Delta) -> None:
        raise BrokenLaw("6", f"{delta.request_id} is answered despite its forged ticket")

    def refused(self, status: int, reason: str) -> None:
        if status not in (400, 403, 503):
            raise BrokenLaw("6", f"a forged ticket is rejected with {status}: {reason}")

    def lost(self, reason: str) -> None:
        """Ignore the loss of the request."""


def _short(message: Message) -> str:
    return str(message[0]) if not isinstance(message[0], Open) else f"Open({message[0].lease}, {message[0].window})"
