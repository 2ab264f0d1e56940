"""Checks all messages between the two sides of pairs and the engine work for them against section 6 of the protocol.

The checks follow from the protocol and the meaning of its messages, never from the implementation of the two sides.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from fd_core.backends.null import NullCache, running_hashes
from fd_core.config import EngineConfig, Limits
from fd_core.disagg.messages import (
    AbortLease,
    Commit,
    Confirm,
    Credit,
    FromDecode,
    FromPrefill,
    Heartbeat,
    KVPiece,
    Open,
    Refuse,
)
from fd_core.effects.operations import (
    AbandonLease,
    Cancel,
    Completion,
    Effect,
    Fetch,
    Fetched,
    Load,
    PrefillJobArrived,
    Save,
    Send,
)
from fd_core.effects.port import CompletionQueue, EffectPort
from fd_core.engine.building.kv_offload import prefill_request_id
from fd_core.engine.core import Engine, EnginePort
from fd_core.kv.blocks import BlockPool
from fd_core.ops.contract import KVCache
from fd_core.scheduling.requests import Request
from fd_core.scheduling.running.slots import SlotTable
from fd_core.simulation.clock.timeline import Timeline
from fd_core.types import IntArray, StepPlan
from tests.simulation.hostile.computing import BrokenLaw, adapted

__all__ = ["EngineWatch", "LeaseWatch", "WatchedCache", "WatchedPort"]

_MOMENT = 0.05
"""Seconds of tolerance for actions that are due at a given time."""
_CALLS = 25
"""Polls of completions by an engine: more than there are in the steps in flight."""


@dataclass(slots=True, eq=False)
class _Lease:
    """Messages about a lease, with sender and with the sender's or receiver's local time."""

    opening: Open
    decode: EngineWatch
    operation: int
    began: float
    wanted: range
    prefill: EngineWatch | None = None
    fits: bool = True
    """True if the prefill side received the opening unaltered."""
    prefill_began: float = 0.0
    decode_received: float = 0.0
    prefill_received: float = 0.0
    decode_over: bool = False
    prefill_over: bool = False
    decode_broke_off: bool = False
    prefill_broke_off: bool = False
    refused: bool = False
    ended: float = 0.0
    """Time at which the decode side ended it."""
    prefill_ended: float = 0.0
    """Time at which it ended for the prefill side."""
    sent_digests: dict[int, bytes] = field(default_factory=dict)
    """Digests of pieces, by index, as sent by the prefill side."""
    credited: int = 0
    received: dict[int, bytes] = field(default_factory=dict)
    """Digests of wanted pieces, by index, as first received by the decode side."""
    landed: int = 0
    """Number of blocks written."""
    commit: Commit | None = None
    committed: float = math.inf
    """Time at which the decode side received the commit."""
    flooded: bool = False
    lies: set[str] = field(default_factory=set)
    """Forged messages to the decode side that end the lease."""

    @property
    def name(self) -> str:
        return self.opening.lease


class LeaseWatch:
    """All leases of a world. `strict`: clocks are correct and no process is suspended."""

    def __init__(
        self,
        *,
        strict: bool,
        gentle: bool,
        tokens_of: Callable[[str, str], int],
        engine_of: Callable[[str], Engine],
    ) -> None:
        """`gentle`: leases end only by their timeout, their client, or an engine without free blocks."""
        self.strict = strict
        self.gentle = gentle
        self.leases: dict[str, _Lease] = {}
        self.engines: dict[str, EngineWatch] = {}
        """Running engine of each worker."""
        self.tokens_of = tokens_of
        """Number of tokens of a request that a worker has delivered."""
        self.engine_of = engine_of
        """Running engine of a worker."""

    # Messages -----------------------------------------------------------------------------------------------

    def on_sent(self, worker: str, message: FromDecode | FromPrefill) -> None:
        """Check a message that a worker sends."""
        engine = self.engines[worker]
        if isinstance(message, Open) and message.lease not in self.leases:
            self._opened(engine, message)
        lease = self.leases.get(message.lease)
        if lease is None:
            return
        if isinstance(message, Refuse):
            lease.refused = True
            return
        if engine is lease.decode:
            self._decode_sent(lease, message)
        else:
            self._prefill_sent(lease, engine, message)

    def on_received(self, worker: str, message: FromDecode | FromPrefill, lie: str = "") -> None:
        """Check a message that a worker is about to receive."""
        lease, engine = self.leases.get(message.lease), self.engines[worker]
        if lease is None:
            return
        if engine is lease.decode:
            self._on_decode_received(lease, message, lie)
        elif lease.prefill in (None, engine):
            self._on_prefill_received(lease, engine, message, lie)

    def settle(self) -> None:
        """Check at the end that each side was notified of what the other one ended."""
        for lease in self.leases.values():
            prefill = lease.prefill
            if prefill is None or not (prefill.alive and lease.decode.alive):
                continue
            if lease.name in prefill.given_up and not (lease.prefill_over or lease.refused):
                raise BrokenLaw("6.1", f"{prefill.worker} cancelled lease {lease.name} without notice")
        for engine in self.engines.values():
            engine.settle(lease for lease in self.leases.values() if lease.prefill is engine)

    # Inside -------------------------------------------------------------------------------------------------

    def _opened(self, engine: EngineWatch, opening: Open) -> None:
        operation = engine.fetch_of.get(opening.request_id)
        fetch = None if operation is None else engine.open.get(operation)
        if operation is None or not isinstance(fetch, Fetch):
            return  # cancelled at once
        job, now = opening.job, engine.timeline.now
        size = engine.limits.block_size
        wanted = range(job.held_blocks, -(-job.num_tokens // size))
        if len(wanted) != len(fetch.blocks):
            raise BrokenLaw("6.1", f"lease {opening.lease} has {len(fetch.blocks)} blocks for {len(wanted)} pieces")
        self.leases[opening.lease] = lease = _Lease(opening, engine, operation, now, wanted)
        lease.decode_received = now
        engine.lease_of[operation] = lease

    def _lives(self, side: str, lease: _Lease, over: bool, now: float, began: float, last_received: float) -> None:
        """Check that a side may still use a lease."""
        if over:
            raise BrokenLaw("6.1", f"the {side} side uses lease {lease.name} after it ended")
        longest = lease.decode.longest + _MOMENT
        if self.strict and (now - began > longest or now - last_received > lease.opening.idle_timeout + _MOMENT):
            raise BrokenLaw(
                "6.1", f"lease {lease.name} has not expired on the {side} side: {now - last_received:g} s of silence"
            )

    def _decode_sent(self, lease: _Lease, message: FromDecode | FromPrefill) -> None:
        now = lease.decode.timeline.now
        if isinstance(message, AbortLease):
            if not lease.decode_over:
                lease.ended = now
            lease.decode_over = lease.decode_broke_off = True
            return
        self._lives("decode", lease, lease.decode_over, now, lease.began, lease.decode_received)
        if lease.flooded and isinstance(message, Credit | Confirm):
            raise BrokenLaw("6", f"lease {lease.name} continues although more pieces arrived than its window holds")
        if isinstance(message, Credit) and message.taken > lease.landed:
            raise BrokenLaw("6", f"lease {lease.name} gives credit for {message.taken} pieces, {lease.landed} written")
        if isinstance(message, Confirm):
            lease.ended, lease.decode_over = now, True
            commit, job = lease.commit, lease.opening.job
            if lease.landed < len(lease.wanted) or commit is None or commit.tokens != job.num_tokens:
                raise BrokenLaw("6.2", f"lease {lease.name} is confirmed with {lease.landed} pieces and {commit}")
            if commit.digest != _digest_of(lease.received):
                raise BrokenLaw("6.2", f"lease {lease.name} is confirmed with other pieces than committed")

    def _prefill_sent(self, lease: _Lease, engine: EngineWatch, message: FromDecode | FromPrefill) -> None:
        now = engine.timeline.now
        if isinstance(message, AbortLease):
            lease.prefill_broke_off |= not lease.prefill_over
            self._prefill_ends(lease)
            return
        self._lives("prefill", lease, lease.prefill_over, now, lease.prefill_began, lease.prefill_received)
        if not lease.fits:
            raise BrokenLaw("6", f"{engine.worker} accepts lease {lease.name} although the two sides are incompatible")
        if isinstance(message, KVPiece):
            if message.index not in lease.wanted or message.index in lease.sent_digests:
                raise BrokenLaw("6.2", f"piece {message.index} of lease {lease.name} is sent twice or not wanted")
            lease.sent_digests[message.index] = message.digest
            if len(lease.sent_digests) - lease.credited > lease.opening.window:
                raise BrokenLaw(
                    "6", f"lease {lease.name} has more than {lease.opening.window} pieces in flight without credit"
                )
        elif isinstance(message, Commit):
            whole = len(lease.sent_digests) == len(lease.wanted) and message.tokens == lease.opening.job.num_tokens
            if not whole or message.digest != _digest_of(lease.sent_digests):
                raise BrokenLaw(
                    "6.2", f"lease {lease.name} is committed with {len(lease.sent_digests)} pieces: {message}"
                )
        elif isinstance(message, Heartbeat):
            engine.require_work(lease)

    def _on_decode_received(self, lease: _Lease, message: FromDecode | FromPrefill, lie: str) -> None:
        if lease.decode_over:
            return
        lease.decode_received = lease.decode.timeline.now
        if isinstance(message, KVPiece) and message.index in lease.wanted and message.index not in lease.received:
            lease.received[message.index] = message.digest
            if lie:
                lease.lies.add(lie)
            lease.flooded |= len(lease.received) - lease.landed > lease.opening.window
        elif isinstance(message, Commit) and lease.commit is None:
            lease.commit, lease.committed = message, lease.decode_received
            if lie:
                lease.lies.add(lie)
        elif isinstance(message, Refuse | AbortLease):
            lease.decode_over = True

    def _on_prefill_received(
        self, lease: _Lease, engine: EngineWatch, message: FromDecode | FromPrefill, lie: str
    ) -> None:
        if lease.prefill is None:
            if not isinstance(message, Open):
                return
            lease.prefill, lease.prefill_began = engine, engine.timeline.now
            lease.fits = message == lease.opening
        lease.prefill_received = engine.timeline.now
        if isinstance(message, Credit):
            lease.credited = max(lease.credited, min(message.taken, len(lease.sent_digests)))
        elif isinstance(message, Confirm | AbortLease):
            self._prefill_ends(lease)

    @staticmethod
    def _prefill_ends(lease: _Lease) -> None:
        if not lease.prefill_over and lease.prefill is not None:
            lease.prefill_over, lease.prefill_ended = True, lease.prefill.timeline.now


class EngineWatch:
    """One epoch of an engine: its open operations and their leases."""

    def __init__(self, watch: LeaseWatch, worker: str, config: EngineConfig, limits: Limits, longest: float) -> None:
        self.watch = watch
        self.worker = worker
        self.limits = limits
        self.longest = longest
        self.alive = True
        self.calls = 0
        self.timeline = Timeline()
        self.open: dict[int, Effect] = {}
        """Operations performed and not yet completed."""
        self.fetch_of: dict[str, int] = {}
        """Last fetch of each request."""
        self.lease_of: dict[int, _Lease] = {}
        self.given_up: set[str] = set()
        self._role = config.role
        self._cancelled: set[int] = set()
        self._arrived: set[str] = set()
        self._sent: dict[str, set[int]] = {}
        self._complete: set[str] = set()
        """Leases whose prompt is being computed."""
        self._fetched: list[object] = []
        """Slot occupancies (request, gen) whose prompt was fetched."""
        self._left: dict[str, int] = {}
        """Number of polls when a client disconnected, by request."""
        self._fetch_into: dict[int, int] = {}
        """Last fetch into each block."""
        self._last_poll = 0.0
        before = watch.engines.get(worker)
        if before is not None:
            before.alive = False
        watch.engines[worker] = self

    # Engine work --------------------------------------------------------------------------------------------

    def performs(self, effect: Effect) -> None:
        """Check an effect about to be performed."""
        match effect:
            case Fetch():
                self._fetches(effect)
            case Send():
                self._sends(effect)
            case Load():
                for block in effect.blocks.tolist():
                    self._fetch_into.pop(block, None)
            case AbandonLease(lease):
                self.given_up.add(lease)
            case Cancel(operation):
                self._cancelled.add(operation)
        if isinstance(effect, Fetch | Send | Load | Save):
            self.open[effect.operation] = effect

    def asks(self) -> None:
        """Check held blocks before completions are polled."""
        self.calls += 1
        self._last_poll = self.timeline.now
        if not self.open:
            return
        free = self._pool.free_blocks()
        for effect in self.open.values():
            if isinstance(effect, Fetch | Send | Load | Save) and not free.isdisjoint(effect.blocks.tolist()):
                raise BrokenLaw("3.2", f"blocks of {effect} are free although it reads or writes them")
            if isinstance(effect, Fetch) and effect.operation not in self._cancelled:
                since = self._left.get(effect.request_id)
                if since is not None and self.calls > since + _CALLS:
                    raise BrokenLaw("6.1", f"{effect.request_id} was aborted, and its prompt is still being fetched")

    def on_completions(self, completions: Iterable[Completion]) -> None:
        """Check completions that the engine receives."""
        for completion in completions:
            if isinstance(completion, PrefillJobArrived):
                self._arrived.add(completion.job.lease)
            effect = self.open.pop(getattr(completion, "operation", -1), None)
            if isinstance(completion, Fetched) and isinstance(effect, Fetch):
                self._has_fetched(effect, completion)

    def announces(self, plan: StepPlan) -> None:
        """Check a plan before it is computed: no work for ended leases, known blocks already sent."""
        if self._role != "prefill":
            return
        for slot in plan.slots.tolist():
            request = self._slots.requests[slot]
            lease = None if request is None else self.watch.leases.get(_lease_name(request.spec.request_id))
            if lease is not None and lease.prefill_over and self._last_poll > lease.prefill_ended:
                raise BrokenLaw("6.1", f"{self.worker} still computes for lease {lease.name}, which has ended")
        for admission in plan.admissions:
            lease = self.watch.leases.get(_lease_name(admission.request_id))
            if lease is None or lease.prefill is not self:
                continue
            known = range(lease.wanted.start, min(admission.computed // self.limits.block_size, lease.wanted.stop))
            if not self._sent.get(lease.name, set()).issuperset(known):
                raise BrokenLaw("6", f"lease {lease.name} waits for blocks that were available from the start")

    def left(self, request_id: str) -> None:
        """Record that the client of a request disconnected."""
        self._left.setdefault(request_id, self.calls)

    def wrote(self, blocks: IntArray) -> None:
        """Check blocks written from outside the device."""
        for block in blocks.tolist():
            lease = self.lease_of.get(self._fetch_into.get(block, 0))
            if lease is not None:
                lease.landed += 1
                if lease.landed > len(lease.received):
                    raise BrokenLaw("6.2", f"pieces of lease {lease.name} are written twice: {lease.landed}")

    def read(self, cache: NullCache, blocks: IntArray) -> None:
        """Check the KV that is sent for a prompt."""
        for effect in self.open.values():
            lease = self.watch.leases.get(effect.lease) if isinstance(effect, Send) else None
            if lease is None or not isinstance(effect, Send):
                continue
            for index, block in enumerate(effect.blocks.tolist(), effect.first):
                if block in blocks and index in lease.wanted:
                    self._require_kv(lease, cache, block, index)

    def require_work(self, lease: _Lease) -> None:
        """Check that the engine works on a lease for which it sends heartbeats."""
        if lease.name in self._complete:
            return
        if self.timeline.now - self._last_poll > lease.opening.idle_timeout + 1e-6:
            raise BrokenLaw("6.1", f"{self.worker} sends heartbeats for lease {lease.name}, but its engine is idle")
        waits = lease.name in self._arrived - self.given_up and not self._engine.num_in_flight
        if waits and prefill_request_id(lease.name) not in self._requests:
            raise BrokenLaw("6.1", f"{self.worker} sends heartbeats for lease {lease.name} without any work")

    def settle(self, leases: Iterable[_Lease]) -> None:
        """Check that the decode side was notified of every lease that the prefill side ended."""
        if (stats := self._engine.stats().leases) is None or stats.sender is None:
            return
        ended = stats.sender.ended
        reported = sum(lease.prefill_broke_off or not lease.decode.alive for lease in leases)
        if ended.get("expired", 0) + ended.get("gave_up", 0) > reported:
            raise BrokenLaw("6.1", f"{self.worker} ended {ended} leases by itself and reported {reported}")

    # Inside -------------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine:
        return self.watch.engine_of(self.worker)

    @property
    def _pool(self) -> BlockPool:
        return self._engine.probe().scheduler.probe().pool

    @property
    def _slots(self) -> SlotTable:
        return self._engine.probe().scheduler.probe().slots

    @property
    def _requests(self) -> Mapping[str, Request]:
        return self._engine.probe().scheduler.probe().requests

    def _fetches(self, effect: Fetch) -> None:
        request = effect.request_id
        if self.watch.tokens_of(self.worker, request):
            raise BrokenLaw("6.3", f"{request} has tokens, but its prompt is fetched")
        if (who := self._requests.get(request)) is not None:
            if any(who is other for other in self._fetched):
                raise BrokenLaw("6.3", f"the prompt of {request} is fetched twice")
            self._fetched.append(who)
        self._left.pop(request, None)
        self._require_room()
        self.fetch_of[request] = effect.operation
        self._fetch_into.update(dict.fromkeys(effect.blocks.tolist(), effect.operation))

    def _require_room(self) -> None:
        """Check that every running request has room for one more token after the lease took its blocks."""
        slots, pool = self._slots, self._pool
        rows = np.flatnonzero(slots.running | slots.loading)
        lengths = np.minimum(np.maximum(slots.num_planned[rows], slots.num_tokens[rows] + 1), slots.limit[rows])
        wanted = int(np.maximum(-(-lengths // slots.block_size) - slots.num_blocks[rows], 0).sum())
        # Blocks of drafts can be freed at once.
        if len(rows) > 1 and not self.limits.max_drafts and wanted > pool.num_free:
            raise BrokenLaw("6.1", f"{self.worker} leases blocks, leaving {pool.num_free} free of {wanted} needed")

    def _has_fetched(self, effect: Fetch, answer: Fetched) -> None:
        outcome, lease = answer.outcome, self.lease_of.get(effect.operation)
        if outcome == "aborted" and effect.operation not in self._cancelled:
            raise BrokenLaw("6.3", f"the fetch for {effect.request_id} was aborted without cause: {answer.reason}")
        if lease is None:
            return
        if outcome == "transferred" and not lease.decode_over:
            raise BrokenLaw("6.2", f"lease {lease.name} is transferred, but the prefill side was not notified")
        if outcome == "damaged" and not (lease.lies or lease.flooded):
            raise BrokenLaw("6.2", f"lease {lease.name} is damaged without a forged message: {answer.reason}")
        if outcome in ("expired", "damaged") and self.watch.strict and not lease.decode_broke_off:
            raise BrokenLaw("6.1", f"lease {lease.name} was {outcome}, but the prefill side was not notified")
        if outcome == "expired":
            self._expired(lease, answer)
        if outcome == "lost" and self.watch.gentle and self.timeline.now - lease.began < self.longest - _MOMENT:
            raise BrokenLaw("6", f"lease {lease.name} is lost although no piece was lost: {answer.reason}")

    def _expired(self, lease: _Lease, answer: Fetched) -> None:
        if any(lie.startswith("damaged") for lie in lease.lies):
            raise BrokenLaw("6.2", f"lease {lease.name} continued after a damaged piece until it expired")
        if not self.watch.strict:
            return
        silent = lease.ended - lease.decode_received > lease.opening.idle_timeout - _MOMENT
        long = lease.ended - lease.began > self.longest - _MOMENT
        stuck = lease.ended - lease.committed > lease.opening.idle_timeout - _MOMENT and lease.landed < len(
            lease.wanted
        )
        if not (silent or long or stuck):
            raise BrokenLaw("6", f"lease {lease.name} expired despite messages: {answer.reason}")
        if self.watch.gentle and not long:
            raise BrokenLaw("6", f"lease {lease.name} expired although no piece was lost: {answer.reason}")

    def _sends(self, effect: Send) -> None:
        lease = self.watch.leases.get(effect.lease)
        if lease is None:
            return
        sent = self._sent.setdefault(effect.lease, set())
        indexes = {effect.first + index for index in range(len(effect.blocks))}
        if not sent.isdisjoint(indexes):
            raise BrokenLaw("6.2", f"blocks {sent & indexes} of lease {lease.name} are sent twice")
        if effect.first < lease.wanted.start:
            raise BrokenLaw("6.1", f"block {effect.first} of lease {lease.name} is sent, but was not requested")
        sent |= indexes
        if effect.tokens is not None:
            self._complete.add(effect.lease)

    def _require_kv(self, lease: _Lease, cache: NullCache, block: int, index: int) -> None:
        job, size = lease.opening.job, self.limits.block_size
        last = min((index + 1) * size, job.num_tokens) - 1
        text = adapted(job.token_ids[: last + 1], job.adapter)
        if cache.hashes[block, last % size] != running_hashes(np.uint64(0), text)[-1]:
            raise BrokenLaw("6.2", f"piece {index} of lease {lease.name} is not the KV of its prompt")


class WatchedPort(EffectPort[object]):
    """Effect port of an engine, with a watch on everything that passes through it."""

    def __init__(self, port: EnginePort, watch: EngineWatch) -> None:
        super().__init__(CompletionQueue())
        self._port = port
        self._watch = watch

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._watch.performs(effect)
            self._port.perform((effect,))

    def completions(self) -> list[Completion]:
        self._watch.asks()
        taken = self._port.completions()
        self._watch.on_completions(taken)
        return taken

    def wait(self, seconds: float) -> None:
        self._port.wait(seconds)

    def stats(self):
        return self._port.stats()

    def close(self) -> None:
        self._port.close()


class WatchedCache(KVCache):
    """KV cache with a watch on copies from and to it."""

    def __init__(self, cache: NullCache, watch: EngineWatch) -> None:
        self.shape = cache.shape
        self.num_blocks = cache.num_blocks
        self._cache = cache
        self._watch = watch

    def layer(self, index: int):
        return self._cache.layer(index)

    def export_blocks(self, blocks: IntArray):
        try:
            self._watch.read(self._cache, blocks)
        except BrokenLaw as error:
            # The copying code treats an exception as a device fault.
            self._watch.timeline.at(self._watch.timeline.now, partial(_raise, error))
        return self._cache.export_blocks(blocks)

    def import_blocks(self, blocks: IntArray, data) -> None:
        self._watch.wrote(blocks)
        self._cache.import_blocks(blocks, data)


def _lease_name(request_id: str) -> str:
    return request_id.removeprefix(prefill_request_id(""))


def _raise(broken: BrokenLaw) -> None:
    raise broken


def _digest_of(digests: dict[int, bytes]) -> bytes:
    """Return the digest of a commit: BLAKE2b of 16 bytes over index (four bytes) and digest of each piece, by index."""
    parts = (index.to_bytes(4, "little") + digests[index] for index in sorted(digests))
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()
