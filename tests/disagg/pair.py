"""A prefill and a decode worker without models: KV is a function of salt and index, so foreign KV is detected."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fd_core.disagg.connectors.contract import (
    Connector,
    ConnectorError,
    ConnectorSettings,
    KVInbox,
    KVOutbox,
    PutResult,
)
from fd_core.disagg.decode.receiver import Receiver
from fd_core.disagg.kv_compatibility import KVCompatibility
from fd_core.disagg.prefill.sender import Sender
from fd_core.effects.operations import (
    AbandonLease,
    Cancel,
    Completion,
    Fetch,
    Fetched,
    LeaseEnded,
    PrefillJobArrived,
    Send,
    Sent,
)
from fd_core.effects.port import CompletionQueue
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.envelope import Envelope
from fd_core.ops.contract import KVCache
from fd_core.ops.polled_timeout import PolledTimeout
from fd_core.types import PrefillJob
from tests.kv.tiers.scripted import SECRET, SHAPE, ScriptedCache, content

BLOCK = BlockFormat.of(SHAPE, "float32")
SIZE = SHAPE.block_size
COMPATIBILITY = KVCompatibility(
    model="m" * 64, dtype="float32", block_size=SIZE, num_layers=1, num_kv_heads=1, head_dim=2
)
PATIENCE = 60.0
"""Timeout in seconds, generous for busy machines."""


class FrameInbox(KVInbox):
    address = b""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def take(self, index, reference, frames):
        if not frames:
            raise ConnectorError("no value arrived")
        return b"".join(frames)

    def done(self, index, reference):
        self.log.append(f"done {index}")

    def close(self):
        self.log.append("close inbox")


class FrameOutbox(KVOutbox):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def put(self, index, parts):
        return PutResult(b"", tuple(parts))

    def close(self):
        self.log.append("close outbox")


class Frames(Connector):
    """Connector that sends values in message frames. `inbox` and `outbox` create the endpoints."""

    name = "frames"

    def __init__(self) -> None:
        super().__init__(ConnectorSettings())
        self.log: list[str] = []
        self.inbox: Callable[[list[str]], KVInbox] = FrameInbox
        self.outbox: Callable[[list[str]], KVOutbox] = FrameOutbox

    def open_inbox(self, lease, *, pieces, window, value_bytes):
        return self.inbox(self.log)

    def open_outbox(self, lease, address, *, window, value_bytes):
        return self.outbox(self.log)


def kv(salt: str, index: int) -> np.ndarray:
    return content(f"{salt}/{index}".encode())


@dataclass
class Computing:
    job: PrefillJob
    at: int
    """Next block to compute."""


class Computer:
    """Sender with the surroundings of a prefill engine; `step` is one iteration of its loop."""

    def __init__(self, sender: Sender, cache: ScriptedCache, *, chunk: int = 2) -> None:
        self.sender = sender
        self.cache = cache
        self.chunk = chunk
        self.free = list(range(cache.num_blocks))
        self.pinned: dict[int, list[int]] = {}
        self.jobs: dict[str, Computing] = {}
        self.ended: list[str] = []
        self.arrived: list[PrefillJob] = []
        self.numbers = itertools.count()
        self.computes = True
        self.refuses: str | None = None

    def step(self) -> None:
        for completion in self.sender.completions():
            self.take(completion)
        if self.computes:
            for computing in list(self.jobs.values()):
                self.compute(computing)

    def take(self, completion: Completion) -> None:
        match completion:
            case Sent(operation):
                blocks = self.pinned.pop(operation)
                self.cache.readable -= set(blocks)
                self.cache.data[blocks] = -1
                self.free += blocks
            case LeaseEnded(lease):
                self.ended.append(lease)
                self.jobs.pop(lease, None)
            case PrefillJobArrived(job):
                self.arrived.append(job)
                if self.refuses:
                    self.sender.perform([AbandonLease(job.lease, self.refuses, refused=True)])
                else:
                    self.jobs[job.lease] = Computing(job, job.held_blocks)

    def compute(self, computing: Computing) -> None:
        job = computing.job
        count = -(-job.num_tokens // SIZE)
        size = min(self.chunk, count - computing.at)
        if len(self.free) < size:
            return
        blocks = [self.free.pop() for _ in range(size)]
        for at, block in enumerate(blocks):
            self.cache.data[block] = kv(job.cache_salt, computing.at + at)
        self.cache.readable |= set(blocks)
        last = computing.at + size == count
        number = next(self.numbers)
        self.pinned[number] = blocks
        tokens = job.num_tokens if last else None
        send = Send(number, job.lease, computing.at, np.array(blocks, np.int32), tokens, cached=3 if last else 0)
        self.sender.perform([send])
        computing.at += size
        if last:
            del self.jobs[job.lease]

    def give_up(self, lease: str) -> None:
        self.jobs.pop(lease, None)
        self.sender.perform([AbandonLease(lease, "the request was aborted")])


class Fetches:
    """Receiver with the surroundings of a decode engine."""

    def __init__(self, receiver: Receiver, cache: ScriptedCache) -> None:
        self.receiver = receiver
        self.cache = cache
        self.free = list(range(cache.num_blocks))
        self.open: dict[int, Fetch] = {}
        self.fetched: dict[int, Fetched] = {}
        self.numbers = itertools.count()

    def fetch(self, peer: str, tokens: int, *, first: int = 0, salt: str = "s", request_id: str = "", **options) -> int:
        number = next(self.numbers)
        count = -(-tokens // SIZE) - first
        blocks = [self.free.pop() for _ in range(count)]
        self.cache.writable |= set(blocks)
        job = PrefillJob(np.arange(tokens, dtype="<i4").tobytes(), first, salt, **options)
        fetch = Fetch(number, peer, job, np.array(blocks, np.int32), request_id=request_id)
        self.open[number] = fetch
        self.receiver.perform([fetch])
        return number

    def cancel(self, number: int) -> None:
        self.receiver.perform([Cancel(number)])

    def step(self) -> None:
        for fetched in self.receiver.completions():
            assert isinstance(fetched, Fetched)
            assert fetched.operation not in self.fetched, "answered twice"
            fetch = self.open.pop(fetched.operation)
            self.fetched[fetched.operation] = fetched
            blocks = fetch.blocks.tolist()
            if fetched.outcome == "transferred":
                for at, block in enumerate(blocks):
                    assert (self.cache.data[block] == kv(fetch.job.cache_salt, fetch.job.held_blocks + at)).all(), (
                        "foreign KV"
                    )
            self.cache.writable -= set(blocks)
            self.free += blocks


def make_sender(cache: KVCache, connector: Connector | None = None, **options: Any) -> Sender:
    chosen = connector or Frames()
    options = {"max_leases": 1000, "max_tokens": 100_000, **options}
    return Sender(cache, *_common(options), lambda name: chosen, CompletionQueue(), **options)


def make_receiver(cache: KVCache, connector: Connector | None = None, **options: Any) -> Receiver:
    options = {"idle_timeout": 5.0, **options}
    return Receiver(cache, *_common(options), connector or Frames(), CompletionQueue(), **options)


def _common(options: dict[str, Any]) -> tuple[BlockFormat, KVCompatibility, Envelope]:
    envelope = Envelope(options.pop("secret", SECRET))
    return options.pop("block", BLOCK), options.pop("compatibility", COMPATIBILITY), options.pop("envelope", envelope)


def pump(condition: Callable[[], bool], *sides: Computer | Fetches) -> None:
    """Run the loops of both engines until a condition holds."""
    limit = PolledTimeout(PATIENCE)
    while not condition():
        assert not limit.expired(), "timed out"
        for side in sides:
            side.step()
        time.sleep(0.001)


class Pair:
    """Both sides in one process over loopback."""

    def __init__(self, *, sender: dict | None = None, receiver: dict | None = None, blocks: int = 64) -> None:
        self.connector = Frames()
        self.prefill_cache, self.decode_cache = ScriptedCache(blocks), ScriptedCache(blocks)
        self.sender = make_sender(self.prefill_cache, self.connector, **sender or {})
        self.receiver = make_receiver(self.decode_cache, self.connector, **receiver or {})
        self.prefill = Computer(self.sender, self.prefill_cache)
        self.decode = Fetches(self.receiver, self.decode_cache)
        self.peer = f"127.0.0.1:{self.sender.port}"

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_) -> None:
        self.receiver.close()
        self.sender.close()
        for side in (self.prefill, self.decode):
            side.step()
        assert self.prefill_cache.broken_rules == []
        assert self.decode_cache.broken_rules == []
        assert not self.prefill.pinned
        assert not self.decode.open

    def fetch(self, tokens: int, **options) -> int:
        return self.decode.fetch(self.peer, tokens, **options)

    def until(self, condition: Callable[[], bool]) -> None:
        pump(condition, self.prefill, self.decode)

    def answers(self, numbers: Iterable[int]) -> list[Fetched]:
        wanted = set(numbers)
        self.until(lambda: wanted <= set(self.decode.fetched))
        return [self.decode.fetched[number] for number in sorted(wanted)]

    def answer(self, number: int) -> Fetched:
        return self.answers([number])[0]

    def idle(self) -> None:
        """Wait until neither side holds anything."""
        self.until(
            lambda: not (self.sender.stats().open_leases or self.receiver.stats().open_leases or self.prefill.pinned)
        )
