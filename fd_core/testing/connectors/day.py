"""An ordinary day of prefill and decode workers: a lease moves the blocks of each prompt, and some end too early."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fd_core.disagg.connectors.contract import MAX_ADDRESS_BYTES, Bytes, Connector, ConnectorError, KVInbox, KVOutbox
from fd_core.disagg.connectors.kv_store import KVStoreConnector
from fd_core.disagg.connectors.tcp import TCPConnector
from fd_core.testing.connectors.cases import TimedEnd
from fd_core.testing.hooks.purity import clocks_ahead
from fd_core.testing.kit.days.account import account_of, require_as_good
from fd_core.testing.kit.days.sleeping import TimedCalls
from fd_core.testing.kit.days.work import HOUR, talks
from fd_core.testing.kit.law import require
from fd_core.testing.stores.values import BUFFERS, HEADER_BYTES, assert_hidden, assert_value, parts_of, sealed

if TYPE_CHECKING:
    from fd_core.testing.connectors.remote import Recipe

_SMALL: Final = 1 << 16


class PeerDay(NamedTuple):
    """Settings that the workers of a day have in common."""

    talks: int
    longest: int
    """Tokens of a prompt and its answer."""
    lengths: tuple[int, ...]
    """Bytes of a sealed block of each model."""
    at_once: int
    """Leases that are open together."""
    block: int = 32
    window: int = 8


SERVERS: Final = {
    "many requests": PeerDay(100, 8192, (600, 900), at_once=300),
    "long prompts": PeerDay(7, 131_072, (500,), at_once=3, block=16),
    "large blocks": PeerDay(7, 16_384, (737_360, 5_242_960), at_once=3, block=1024),
}


class _Job(NamedTuple):
    at: float
    habit: str
    name: str
    pieces: range
    length: int
    decode: int
    leaves: bool


@cache
def _jobs(server: PeerDay) -> list[_Job]:
    """Return the prompts of a day, without the blocks that the decode worker has from the turn before."""
    found = list[_Job]()
    for number, talk in enumerate(talks(server.talks, longest=server.longest, seed=1)):
        now, have = 0.0, 0
        for at, turn in enumerate(talk.turns):
            now += turn.pause
            pieces = range(have, len(turn.spec.prompt) // server.block)
            have = (len(turn.spec.prompt) + len(turn.answer)) // server.block
            name = hashlib.blake2b(f"{talk.habit} {number}.{at}".encode(), digest_size=16).hexdigest()
            length = server.lengths[number % len(server.lengths)]
            if pieces:
                found.append(_Job(now, talk.habit, name, pieces, length, number // 2, turn.leaves_after is not None))
    return sorted(found, key=lambda job: job.at)


def value_of(name: str, index: int, length: int) -> tuple[bytes, memoryview]:
    """Return header and payload of a sealed block; every third one was compressed."""
    key = hashlib.blake2b(f"{name}.{index}".encode(), digest_size=16).digest()
    return sealed(key, 0, (length - HEADER_BYTES) // (2 if index % 3 == 2 else 1))


@dataclass
class _MovedLease:
    """A lease: its ends, and where each piece is."""

    job: _Job
    inbox: KVInbox
    outbox: KVOutbox
    sides: tuple[Connector, Connector]
    threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor]
    limits: dict[str, int]
    unsent: deque[int]
    put: deque[tuple[int, bytes, tuple[Bytes, ...]]] = field(default_factory=deque)
    """Pieces whose message is not sent yet."""
    sent: dict[int, tuple[bytes, tuple[Bytes, ...]]] = field(default_factory=dict)
    taken: dict[int, tuple[bytes, Bytes]] = field(default_factory=dict)
    until: int = 1 << 60
    """Moves after which it is given up."""

    @property
    def flying(self) -> int:
        return len(self.put) + len(self.sent) + len(self.taken)


class _DayOfLeases:
    def __init__(self, make: Callable[[], Connector], server: PeerDay) -> None:
        self.make, self.server, self.draw = make, server, random.Random(2)  # noqa: S311
        self.decodes, self.prefills = ([make() for _ in range(2)] for _ in range(2))
        self.pools = [ThreadPoolExecutor(1) for _ in range(4)]
        self.leases = list[_MovedLease]()
        self.timed = TimedCalls()
        self.run = self.timed.run
        self.messages: dict[str, float] = defaultdict(float)
        self.retried = set[str]()

    def open(self, job: _Job) -> None:
        number = len(job.pieces) + self.timed.count
        decode, prefill = self.decodes[job.decode % 2], self.prefills[number % 2]
        gives_up = job.leaves and job.name not in self.retried
        job = job._replace(length=job.length // 2) if gives_up else job  # of another model; the client asks again
        limits = {"window": min(len(job.pieces), (self.server.window, 3)[number % 2]), "value_bytes": job.length}
        threads = self.pools[number % 2], self.pools[2 + number % 2]
        inbox: Any = self.run(threads[0], decode.open_inbox, job.name, pieces=job.pieces, **limits)
        outbox: Any = self.run(threads[1], prefill.open_outbox, job.name, inbox.address, **limits)
        inbox, outbox = (TimedEnd(end, decode.settings.timeout) for end in (inbox, outbox))
        self.messages[job.habit] += MAX_ADDRESS_BYTES + len(inbox.address) + 64 * len(job.pieces)
        lease = _MovedLease(job, inbox, outbox, (decode, prefill), threads, limits, deque(job.pieces))
        if gives_up:
            lease.until = 1 + number % 29
        self.leases.append(lease)

    def value(self, lease: _MovedLease, index: int) -> bytes:
        return b"".join(value_of(lease.job.name, index, lease.job.length))

    def move(self, lease: _MovedLease) -> bool:
        """Make a move that is possible; return False if there is none."""
        moves: list[Callable[[_MovedLease], None]] = []
        if lease.unsent and lease.flying < lease.limits["window"]:
            moves.append(self._put)
        moves += [self._send] * bool(lease.put) + [self._take] * bool(lease.sent) + [self._done] * bool(lease.taken)
        if not moves:
            return False
        self.draw.choice(moves)(lease)
        return True

    def _put(self, lease: _MovedLease) -> None:
        index = lease.unsent.popleft()
        header, payload = value_of(lease.job.name, index, lease.job.length)
        kind = (*BUFFERS,)[index % len(BUFFERS)]
        small = len(payload) < _SMALL
        parts: Sequence[Bytes] = parts_of(header + payload, 1 + index % 3, kind) if small else (header, payload)
        if self.timed.count % 50 == 0:
            too_long = partial(lease.outbox.put, index, (header, *[payload] * 3))
            self.refused(lease, "a value that is too long", too_long, hidden=bytes(payload))
        reference, frames = self.run(lease.threads[1], lease.outbox.put, index, parts)
        require(len(frames) <= len(parts) + 1, "6.1", f"put returned {len(frames)} frames for {len(parts)} parts")
        for part in parts if not frames and small else ():
            flat = memoryview(part).cast("B")
            if not flat.readonly:
                flat[:] = bytes(len(flat))
        lease.put.append((index, reference, frames))

    def _send(self, lease: _MovedLease) -> None:
        index, reference, frames = lease.put.popleft()
        lease.sent[index] = bytes(reference), tuple(bytes(frame) for frame in frames)
        self.messages[lease.job.habit] += len(reference) + sum(map(len, lease.sent[index][1]))

    def _take(self, lease: _MovedLease) -> None:
        index = self.draw.choice([*lease.sent])
        reference, frames = lease.sent.pop(index)
        if self.timed.count % 50 == 1:
            forged = [bytes(lease.limits["value_bytes"] + 1)]
            self.refused(lease, "a piece that is too long", partial(lease.inbox.take, index, b"?", forged), 0)
        value = self.run(lease.threads[0], lease.inbox.take, index, reference, frames)
        assert_value(f"piece {index}", value, self.value(lease, index))
        lease.taken[index] = reference, value

    def _done(self, lease: _MovedLease) -> None:
        index = self.draw.choice([*lease.taken])
        reference, value = lease.taken.pop(index)
        assert_value(f"piece {index} before it is done", value, self.value(lease, index))
        self.run(lease.threads[0], lease.inbox.done, index, reference)

    def refused(
        self, lease: _MovedLease, what: str, call: Callable[[], object], thread: int = 1, hidden: bytes = b""
    ) -> None:
        try:
            self.run(lease.threads[thread], call)
        except ConnectorError as error:
            assert_hidden(hidden, error)
        else:
            require(False, "6.1", f"{what} was accepted")

    def close(self, lease: _MovedLease) -> None:
        """Close both ends; one that is given up has pieces in flight, and its frames may be sent later."""
        before = [tuple(map(bytes, frames)) for _, _, frames in lease.put]
        ends: list[KVInbox | KVOutbox] = [lease.inbox, lease.outbox]
        for at in (0, 1) if self.timed.count % 2 else (1, 0):
            self.run(lease.threads[at], ends[at].close)
        after = [tuple(map(bytes, frames)) for _, _, frames in lease.put]
        require(before == after, "6.1", "closing an outbox changes frames that are not sent yet")
        if lease.unsent or lease.flying:
            index = lease.job.pieces[-1]
            self.refused(lease, "a piece of a lease that is over", partial(lease.outbox.put, index, [b"late"]))
            piece = next(iter(lease.sent.values()), (b"", (b"late",)))
            self.refused(lease, "a piece of a lease that is over", partial(lease.inbox.take, index, *piece), 0)
        self.leases.remove(lease)
        for at in (0, 1):  # closing is idempotent, also if others use the same resources by now
            self.run(lease.threads[at], ends[at].close)

    def restart(self, side: list[Connector], number: int) -> None:
        """Let a worker end, whose leases are given up, while another one begins."""
        old, side[number] = side[number], self.make()
        for lease in [*self.leases]:
            if old in lease.sides:
                self.close(lease)
        old.close()
        old.close()


def _live(make: Callable[[], Connector], server: PeerDay) -> Generator[None, None, Mapping[str, float]]:
    history = _DayOfLeases(make, server)
    with ExitStack() as stack:
        for each in (*history.decodes, *history.prefills):
            stack.callback(each.close)
        for pool in history.pools:
            stack.callback(pool.shutdown)
        stack.enter_context(history.timed.counted())
        waiting, now, hour, steps = deque(_jobs(server)), 0.0, 0, 0
        while waiting or history.leases:
            while waiting and len(history.leases) < server.at_once:
                job = waiting.popleft()
                now = max(now, job.at)
                if job.at > (hour + 1) * HOUR and hour < 8:
                    hour += 1
                    history.timed.note_resources(8 * len(history.leases))
                    yield
                    side = history.decodes if hour % 2 else history.prefills
                    history.restart(side, hour // 2 % 2)
                    stack.callback(side[hour // 2 % 2].close)
                with clocks_ahead(history.decodes[0], now):
                    history.open(job)
            with clocks_ahead(history.decodes[0], now):
                for lease in [*history.leases]:
                    for _ in range(history.draw.randrange(1, 40)):
                        steps += 1
                        lease.until -= 1
                        if lease.until < 0 or not history.move(lease):
                            history.close(lease)
                            if lease.until < 0:  # the client asks again
                                history.retried.add(lease.job.name)
                                history.open(lease.job._replace(length=2 * lease.job.length))
                            break
        for _ in range(hour, 4):
            yield
    return {f"bytes of messages of {habit}": size for habit, size in history.messages.items()} | history.timed.figures()


def require_an_ordinary_day(cls: type[Connector], recipe: Recipe, server: str) -> None:
    """Live the day of a server with a connector, and compare what users notice with one of the core."""
    settings = SERVERS[server]
    secrets = [bytes(value_of(job.name, job.pieces[0], job.length)[1][:64]) for job in _jobs(settings)[:3]]
    right = KVStoreConnector if recipe.kv_store else TCPConnector
    core = account_of(partial(_live, lambda: right(recipe.settings()), settings))
    mine = account_of(partial(_live, lambda: cls(recipe.settings()), settings), *secrets)
    slack = dict.fromkeys(core.figures, 1.2) | {"peak": 2.0, "grown": 2.0}
    require_as_good(mine, core, f"a day of workers with {server}", "6.1", slack)
