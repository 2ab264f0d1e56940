"""Prefill on another worker, as the scheduler sees it: which slot's blocks are leased out, and what leaves for others.

Pure, as the scheduler is: leases begin with effects, what became of them comes back (`fd_core.kv.effects`). On the
decode side a request whose prompt is computed elsewhere is admitted as any other, with all that it and the running
requests may still need, and waits in its slot until its KV has come, or will not. On the prefill side the settled
blocks of a request leave one after the other while the rest is computed. A block that is written or read by a transfer
is pinned from the effect to its completion, so nobody else gets it, whatever happens to the request meanwhile.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, get_args

import msgspec
import numpy as np

from fd_core.kv.blocks import BlockPool
from fd_core.kv.effects import Cancel, Fetch, Fetched, GiveUp, Outcome, Send, Transfer, Transferred
from fd_core.metrics import counter
from fd_core.scheduling.requests import Request
from fd_core.scheduling.storage import Arrival
from fd_core.types import FinishReason, IntArray, PrefillJob, frozen

__all__ = ["TransferCounters", "Transfers"]


class TransferCounters(msgspec.Struct, kw_only=True):
    """What happened since the start; only grows."""

    outcomes: Annotated[
        dict[Outcome, int],
        counter(
            "prefills_elsewhere",
            "Requests whose prompt a prefill worker was to compute, by outcome.",
            label="outcome",
            values=get_args(Outcome),
        ),
    ] = msgspec.field(default_factory=Counter)
    fetched_tokens: Annotated[
        int, counter("kv_fetched_tokens", "Tokens whose KV was fetched from a prefill worker.")
    ] = 0
    sent_blocks: Annotated[int, counter("kv_sent_blocks", "KV blocks computed for decode workers.")] = 0
    given_up: int = 0
    """Requests of decode workers that ended before all their KV was sent."""


@dataclass(frozen=True, slots=True)
class _Fetching:
    request: Request
    slot: int
    first: int
    tokens: int
    blocks: IntArray


class Transfers:
    """Leases in flight, of both sides; owned by one scheduler."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.counters = TransferCounters()
        self._pool = pool
        self._block_size = block_size
        self._effects: list[Transfer] = []
        self._operations = 0
        self._fetches: dict[int, _Fetching] = {}
        self._sends: dict[int, IntArray] = {}

    @property
    def busy(self) -> bool:
        """Whether a transfer holds blocks, or an effect waits to be performed."""
        return bool(self._fetches or self._sends or self._effects)

    def take_effects(self) -> list[Transfer]:
        """Return the effects decided since the last call; the caller performs them in order."""
        effects, self._effects = self._effects, []
        return effects

    def completed(self, answer: Transferred) -> Arrival | None:
        """A transfer is over; return the request that may compute, if one waited for it."""
        if isinstance(answer, Fetched):
            return self._fetched(answer)
        self._pool.unpin(self._sends.pop(answer.operation))
        return None

    # The decode side --------------------------------------------------------------------------------------

    @staticmethod
    def wants(request: Request) -> bool:
        """Whether a request's prompt is to be computed elsewhere, which is tried once and before its first token."""
        return bool(request.spec.prefill_at) and request.prefill is None and not len(request.generated)

    def fetch(self, request: Request, slot: int, tokens: IntArray, table: IntArray, first: int) -> bool:
        """Lease the blocks of `table` behind the `first` ones that hold KV; False if computing is less than a block.

        The last token is computed here in any case: it yields the next one.
        """
        size = self._block_size
        wanted = len(tokens) - 1
        if wanted - first * size < size:
            self._is_over(request, "held")
            return False
        blocks = frozen(table[first : -(-wanted // size)].copy())
        self._pool.pin(blocks)
        request.fetch = self._next()
        self._fetches[request.fetch] = _Fetching(request, slot, first, wanted, blocks)
        spec = request.spec
        prompt = tokens[:wanted].astype("<i4", copy=False).tobytes()
        job = PrefillJob(prompt, first, spec.cache_salt, spec.priority, spec.tenant)
        self._effects.append(Fetch(request.fetch, spec.prefill_at, job, blocks, slot, spec.request_id))
        return True

    def abandon(self, request: Request) -> None:
        """A request was aborted while it waited for its KV; its blocks stay pinned until the lease is over."""
        if request.fetch is not None:
            self._effects.append(Cancel(request.fetch))
            request.fetch = None
            self._is_over(request, "aborted")

    def _fetched(self, answer: Fetched) -> Arrival | None:
        fetching = self._fetches.pop(answer.operation)
        self._pool.unpin(fetching.blocks)
        request = fetching.request
        if request.fetch != answer.operation:
            return None
        request.fetch = None
        self._is_over(request, answer.outcome)
        held = fetching.first * self._block_size
        if answer.outcome != "transferred":
            return Arrival(fetching.slot, request, held, held)
        self.counters.fetched_tokens += fetching.tokens - held
        return Arrival(fetching.slot, request, fetching.tokens, max(held, min(answer.cached, fetching.tokens)))

    def _is_over(self, request: Request, outcome: Outcome) -> None:
        request.prefill = outcome
        self.counters.outcomes[outcome] += 1

    # The prefill side -------------------------------------------------------------------------------------

    def settled(self, request: Request, blocks: IntArray) -> None:
        """The leading `blocks` of a leased request hold settled KV: send those that were not sent."""
        job = request.spec.prefill_job
        if job is not None and len(blocks) > request.sent:
            self._send(request, job.lease, blocks, None)

    def finished(self, request: Request, blocks: IntArray, reason: FinishReason) -> None:
        """A leased request has computed its prompt, whose KV is in `blocks`, its last one included: send the rest."""
        job = request.spec.prefill_job
        if job is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            prompt = len(request.spec.prompt)
            self._send(request, job.lease, blocks[: -(-prompt // self._block_size)], prompt)
            request.sent_all = True

    def ended(self, request: Request, reason: FinishReason) -> None:
        """A leased request is over, however it ended."""
        job = request.spec.prefill_job
        if job is not None and not request.sent_all:
            self.counters.given_up += 1
            self._effects.append(GiveUp(job.lease, f"the prefill worker ended the request: {reason.value}"))

    def _send(self, request: Request, lease: str, blocks: IntArray, tokens: int | None) -> None:
        first = min(request.sent, len(blocks))
        sent = frozen(np.array(blocks[first:], np.int32))
        self._pool.pin(sent)
        operation = self._next()
        self._sends[operation] = sent
        self._effects.append(Send(operation, lease, first, sent, tokens, request.cached_tokens or 0))
        self.counters.sent_blocks += len(sent)
        request.sent = len(blocks)

    def _next(self) -> int:
        self._operations += 1
        return self._operations
