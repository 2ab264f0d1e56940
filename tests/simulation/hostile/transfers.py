"""What lies between pairs of a hostile world: a network with a habit, and peers that lie."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from fd_core.disagg.messages import Alive, Commit, Credit, FromPrefill, KVPiece, Open
from fd_core.simulation.clock.timeline import Network
from fd_core.simulation.clock.virtual_loop import VirtualThreads
from fd_core.simulation.storage.storage import Arrive, Message, TransferNetwork
from fd_core.types import Delta, RequestSpec
from tests.simulation.hostile.computing import BrokenLaw
from tests.simulation.hostile.leases import LeaseWatch
from tests.simulation.hostile.plans import PairPlan

__all__ = ["HARMLESS_HABITS", "HostileTransfers", "Stranger", "forged_ticket"]

HARMLESS_HABITS = frozenset({"", "first_words_lost", "late", "echo", "foreign_pieces", "old_credit"})
"""Habits with which every lease that is not over may still be transferred."""
_ECHOES = (0.0, 0.05, 0.4, 1.5)
_TOGETHER = 0.06
"""Seconds for which pieces are kept back, to arrive all at once."""

_Sent = tuple[Message, str, float]
"""A message in place of another one, what lie it is, if it ends the lease, and how much later it leaves."""


class HostileTransfers(TransferNetwork):
    """A network between pairs that is watched, and that treats what is said as the plan of the world has it."""

    def __init__(self, network: Network, plan: PairPlan, watch: LeaseWatch, seed: int, say: Callable[[str], None]):
        super().__init__(network)
        self.window, self.longest = plan.window, plan.longest
        self._habit = plan.habit
        self._every = plan.every
        self._watch = watch
        self._draw = random.Random(f"lies/{seed}")
        self._say = say
        self._lies: list[tuple[Message, str]] = []
        self._seen: set[tuple[str, object]] = set()
        self._just_lost: set[tuple[str, str]] = set()
        """Who said something about which lease that was lost last."""
        self._chances = 0

    def heard(self, place: str, message: Message) -> None:
        lie = next((lie for forged, lie in self._lies if forged is message), "")
        self._say(f"{place} hears {_short(message)}{' LIE ' + lie if lie else ''}")
        self._watch.heard(place, message[0], lie)

    def _leave(self, threads: VirtualThreads, origin: str, target: str, message: Message, arrive: Arrive) -> None:
        self._say(f"{origin} says {_short(message)}")
        self._watch.said(origin, message[0])
        self.said += 1
        for each, lie, later in self._treated(origin, message):
            if lie:
                self._lies.append((each, lie))
            for seconds in self.fate(self.said):
                threads.tell(partial(self.network.send, origin, target, partial(arrive, each)), seconds + later)

    def _treated(self, origin: str, message: Message) -> Sequence[_Sent]:
        as_it_is = [(message, "", 0.0)]
        match self._habit:
            case "":
                return as_it_is
            case "first_words_lost":
                word, speaker = (origin, message[0]), (origin, message[0].lease)
                # Whoever hears nothing for a silence may take the other for dead: no two words in a row are lost.
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
        """Yield what is said instead of a message; nothing leaves it as it is."""
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
            case "too_much_credit", Credit(lease=lease) | Alive(lease=lease) if not isinstance(message, FromPrefill):
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
    """Return what somebody sends who has seen the ticket of a request, and has an address of his own."""
    name, (peer, mac) = spec.request_id, spec.prefill_at.split(";")
    name, ticket = (
        (f"{name[:-1]}~", f"{peer};{mac}"),
        (f"{name}/y", f"{peer};{'0' * 64}"),
        (f"{name}{peer[0]}", f"{peer[1:]};{mac}"),
        (f"{name}", f"a{peer};{mac}"),
    )[number % 4]
    return msgspec.structs.replace(spec, request_id=name, prefill_at=ticket)


class Stranger:
    """Waits for the answer to a request with a forged ticket; there must be none."""

    def answered(self, delta: Delta) -> None:
        raise BrokenLaw("6", f"{delta.request_id} has a forged ticket and is answered")

    def refused(self, status: int, reason: str) -> None:
        if status not in (400, 403, 503):
            raise BrokenLaw("6", f"a forged ticket is refused with {status}: {reason}")

    def lost(self, reason: str) -> None:
        """Nothing is left of it."""


def _short(message: Message) -> str:
    return str(message[0]) if not isinstance(message[0], Open) else f"Open({message[0].lease}, {message[0].window})"
