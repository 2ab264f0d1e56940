"""Two engines and the leases between them, with every message and copy triggered by the test.

Copies happen as late as the contract allows: a block is read when its `Send` is acknowledged, a prompt is written when
its `Fetch` is. Until then, and in every failed lease, leased blocks hold garbage, so a block that is reused too early,
or used without having been transferred, changes a text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from fd_core.backends.null import running_hashes
from fd_core.effects.operations import (
    AbandonLease,
    Cancel,
    Effect,
    Effects,
    Fetch,
    Fetched,
    Load,
    Lookup,
    Save,
    Send,
    Sent,
)
from fd_core.engine.core import Engine
from fd_core.testing.models.texts import Texts
from fd_core.types import IntArray, PrefillOutcome, RequestSpec, SamplingParams
from tests.engine.stepping import How, Stepper

__all__ = ["Lease", "Pair", "Worker"]

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Lease:
    """Network state of one lease, which both sides may already have forgotten."""

    name: str
    fetch: Fetch
    ordered: bool = False
    """True once the prefill worker accepted the order."""
    decode_closed: bool = False
    """True once the decode worker was notified of the outcome."""
    prefill_closed: bool = False
    """True once the prefill worker released the lease."""
    cancelled: bool = False
    pieces: dict[int, Any] = field(default_factory=dict)
    num_offered: int = 0
    """Leading blocks offered in sends, each once and in order."""
    tokens: int | None = None
    cached: int = 0
    unread: int = 0
    """Sends not yet acknowledged."""
    ends: int = 0
    """Final sends and cancellations of the prefill worker: at most one."""

    @property
    def complete(self) -> bool:
        """Return True if everything arrived, so that the transfer may succeed."""
        first, count = self.fetch.job.held_blocks, len(self.fetch.blocks)
        return self.tokens == self.fetch.job.num_tokens and self.pieces.keys() >= set(range(first, first + count))


class Worker(Stepper):
    """One engine of a pair. Passes its transfers to the pair and is audited for the blocks they hold."""

    def __init__(self, engine: Engine, pair: Pair, *, eager: bool) -> None:
        super().__init__(engine, eager=eager)
        self.pair = pair
        self.probe.transferring.paired = True
        self.holding: dict[int, Fetch | Send] = {}
        """Transfers that may still read or write their blocks."""

    @property
    def busy(self) -> bool:
        """Return True if anything is left to do or to acknowledge."""
        return self.engine.has_work or bool(self.in_flight)

    def perform(self, effects: Effects) -> None:
        super().perform(effects)
        for effect in effects.operations:
            if isinstance(effect, Fetch | Send):
                self.holding[effect.operation] = effect
            if not isinstance(effect, Lookup | Load | Save):
                self.pair.take(self, effect)

    def turn(self, depth: int, times: int = 1) -> None:
        """Run one iteration of the engine loop."""
        for _ in range(times):
            self.flush()
            while len(self.in_flight) < depth and self.plan() is not None:
                pass
            if self.in_flight:
                self.answer()
            if self.tiers is not None and self.tiers.pending:
                self.complete(0, How.WELL)

    def notify(self, answer: Fetched | Sent) -> None:
        """Notify the scheduler of the outcome of a transfer."""
        del self.holding[answer.operation]
        self.scheduler.complete(answer)
        self.audit()

    def check_idle(self) -> None:
        super().check_idle()
        assert not self.holding
        assert not self.probe.pool._pins.any(), "a block stays pinned"
        assert self.probe.pool.num_free == self.limits.num_kv_blocks

    def audit(self) -> None:
        super().audit()
        free = self.probe.pool.free_blocks()
        for effect in self.holding.values():
            blocks = set(effect.blocks.tolist())
            assert not blocks & free, "a block is free while a transfer reads or writes it"
            if isinstance(effect, Fetch):
                assert not any(blocks & touched for touched in self._touched.values()), "a step touches leased blocks"

    def spoil(self, blocks: IntArray) -> None:
        """Overwrite blocks with garbage."""
        garbage = np.full_like(self.runner.cache.export_blocks(blocks), 1.5)
        self.runner.cache.import_blocks(blocks, garbage)


class Pair:
    """A decode and a prefill engine, and the leases between them."""

    def __init__(self, decode: Engine, prefill: Engine, *, eager: bool = False) -> None:
        self.eager = eager
        self.decode = Worker(decode, self, eager=eager)
        self.prefill = Worker(prefill, self, eager=eager)
        self.leases: list[Lease] = []
        """Leases that at least one side still knows, oldest first."""
        self.reading: list[tuple[Lease, Send]] = []
        """Sends not yet acknowledged, oldest first."""
        self.outcomes: list[PrefillOutcome] = []
        self._count = 0

    # Requests of the engines ------------------------------------------------------------------------------

    def take(self, worker: Worker, effect: Effect) -> None:
        """Handle a transfer operation of an engine."""
        match effect:
            case Fetch():
                assert worker is self.decode
                self._count += 1
                self.leases.append(Lease(f"l{self._count}", effect))
                worker.spoil(effect.blocks)
            case Cancel():
                for lease in self.leases:
                    lease.cancelled |= worker is self.decode and lease.fetch.operation == effect.operation
            case Send():
                assert worker is self.prefill
                self._take_send(effect)
            case AbandonLease():
                assert worker is self.prefill
                lease = self._named(effect.lease)
                lease.ends += 1
                assert lease.ends == 1, "a lease ends twice"
                self._close_prefill(lease)

    def _take_send(self, send: Send) -> None:
        """Check that each block after the decode worker's own prefix is offered once, in order and settled."""
        lease, size = self._named(send.lease), self.prefill.limits.block_size
        assert not lease.ends, "a block is sent after the last send"
        assert send.first == max(lease.num_offered, lease.fetch.job.held_blocks), "a block is left out or sent twice"
        assert len(send.blocks) or send.tokens is not None, "a send without blocks is pointless"
        lease.num_offered = send.first + len(send.blocks)
        hashes = running_hashes(np.uint64(0), lease.fetch.job.token_ids)
        for position, block in enumerate(send.blocks.tolist(), send.first):
            wanted = hashes[position * size : (position + 1) * size].tolist()
            held = self.prefill.runner.cache.layer(0)[block, : len(wanted)].tolist()
            assert held == wanted, "a block is sent that does not hold its part of the prompt"
            assert len(wanted) == size or send.tokens is not None, "a block is sent before it is settled"
        if send.tokens is not None:
            assert send.tokens == lease.fetch.job.num_tokens
            assert lease.num_offered == -(-send.tokens // size), "the last send leaves blocks out"
            lease.ends += 1
        lease.unread += 1
        self.reading.append((lease, send))

    def _named(self, name: str) -> Lease:
        (lease,) = [lease for lease in self.leases if lease.name == name]
        return lease

    # Network events ---------------------------------------------------------------------------------------

    @property
    def undelivered(self) -> list[Lease]:
        """Return leases whose order has not reached the prefill worker."""
        return [lease for lease in self.leases if not lease.ordered and not lease.prefill_closed]

    @property
    def awaited(self) -> list[Lease]:
        """Return leases whose outcome has not reached the decode worker."""
        return [lease for lease in self.leases if not lease.decode_closed]

    @property
    def unwanted(self) -> list[Lease]:
        """Return leases that the decode worker has closed and the prefill worker still serves."""
        return [lease for lease in self.leases if lease.decode_closed and lease.ordered and not lease.prefill_closed]

    def ask(self, lease: Lease) -> None:
        """Deliver the order to the prefill worker; that of a closed lease may arrive late."""
        lease.ordered = True
        job = msgspec.structs.replace(lease.fetch.job, lease=lease.name)
        self.prefill.submit(
            RequestSpec(
                request_id=lease.name,
                prompt=tuple(job.token_ids.tolist()),
                params=_ONE_TOKEN,
                cache_salt=job.cache_salt,
                priority=job.priority,
                tenant=job.tenant,
                prefill_job=job,
            )
        )

    def refuse(self, lease: Lease) -> None:
        """The prefill worker rejects the order."""
        self._close_prefill(lease)

    def read(self, index: int) -> None:
        """Complete a send: its blocks were read if the lease is still wanted."""
        lease, send = self.reading.pop(index)
        lease.unread -= 1
        if not lease.decode_closed:
            for position, block in enumerate(send.blocks, send.first):
                lease.pieces[position] = self.prefill.runner.cache.export_blocks(np.array([block], np.int32))
            if send.tokens is not None:
                lease.tokens, lease.cached = send.tokens, send.cached
        self.prefill.notify(Sent(send.operation))
        self._forget(lease)

    def end(self, lease: Lease, outcome: PrefillOutcome = "transferred") -> None:
        """Deliver the outcome of a lease to the decode worker; it is a failure unless everything has arrived."""
        if outcome == "transferred" and not lease.complete:
            outcome = "aborted" if lease.cancelled else "lost"
        blocks = lease.fetch.blocks
        if outcome == "transferred":
            for position, block in enumerate(blocks, lease.fetch.job.held_blocks):
                self.decode.runner.cache.import_blocks(np.array([block], np.int32), lease.pieces[position])
        else:
            self.decode.spoil(blocks)
        self._close_decode(lease)
        self.outcomes.append(outcome)
        self.decode.notify(Fetched(lease.fetch.operation, outcome, cached=lease.cached))

    def abort(self, lease: Lease) -> None:
        """Cancel a lease at the prefill worker, by message or by its own timeout."""
        self.prefill.abort(lease.name)
        self.prefill.flush()

    def replace(self, worker: Worker, engine: Engine) -> Worker:
        """Kill an engine with its leases; return its successor, which resumes from the delivered texts."""
        new = Worker(engine, self, eager=self.eager)
        if worker is self.prefill:
            self.prefill = new
            self.reading.clear()
            for lease in list(self.leases):
                lease.unread = 0
                if lease.ordered:
                    self._close_prefill(lease)
        else:
            self.decode = new
            for lease in list(self.leases):
                self._close_decode(lease)
        new.texts = worker.texts
        return new

    def calm(self) -> None:
        """Deliver everything in transit and end what can no longer succeed."""
        for lease in self.unwanted:
            if not lease.ends:
                self.abort(lease)
        for lease in self.undelivered:
            if lease.decode_closed:
                self.refuse(lease)
            else:
                self.ask(lease)
        while self.reading:
            self.read(0)
        for lease in self.awaited:
            if lease.complete or lease.prefill_closed or lease.cancelled:
                self.end(lease)

    def _close_decode(self, lease: Lease) -> None:
        lease.decode_closed = True
        self._forget(lease)

    def _close_prefill(self, lease: Lease) -> None:
        lease.prefill_closed = True
        self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        if not lease.unread and lease.ends:
            lease.prefill_closed = True
        if lease.decode_closed and lease.prefill_closed and not lease.unread and lease in self.leases:
            self.leases.remove(lease)

    # Completion -------------------------------------------------------------------------------------------

    def run(self, depth: int = 1, turns: int = 3000) -> Texts:
        """Run both engines over a calm network until nothing is left; return what the decode worker delivered."""
        for _ in range(turns):
            self.decode.turn(depth)
            self.prefill.turn(depth)
            self.calm()
            if not (self.decode.busy or self.prefill.busy or self.leases):
                break
        assert not self.leases, "a lease has no end"
        for worker in (self.decode, self.prefill):
            assert not worker.busy, "an engine did not become idle"
            worker.check_idle()
        return self.decode.texts
