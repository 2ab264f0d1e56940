"""KV transfer between workers, from the scheduler's side: which blocks are leased, and which are sent.

On the decode side, a request whose prompt another worker computes is admitted like any other request, with all blocks
that it and the running requests may still need. It waits in its slot until its KV has arrived or the fetch failed. On
the prefill side, the settled blocks of a request are sent one after the other while the rest of the prompt is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, get_args

import msgspec

from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.effects.operations import AbandonLease, Fetch, Fetched, Send
from fd_core.kv.prefix import ordered_blocks
from fd_core.scheduling.operations.registry import Operations
from fd_core.scheduling.requests import Request
from fd_core.types import MAX_JOB_PIXELS, FinishReason, IntArray, PrefillJob, PrefillOutcome
from fd_core.types.metrics import counter


class TransferCounters(msgspec.Struct, kw_only=True):
    """Counters since the start; monotonic."""

    outcomes: Annotated[
        dict[PrefillOutcome, int],
        counter(
            "prefills_elsewhere",
            "Requests whose prompt a prefill worker was to compute, by outcome.",
            label="outcome",
            values=get_args(PrefillOutcome),
        ),
    ] = msgspec.field(default_factory=dict)
    fetched_tokens: Annotated[
        int, counter("kv_fetched_tokens", "Tokens whose KV was fetched from a prefill worker.")
    ] = 0
    sent_blocks: Annotated[int, counter("kv_sent_blocks", "KV blocks computed for decode workers.")] = 0


@dataclass(slots=True)
class KVTransferring:
    """Decides what is fetched and sent; owned by one scheduler."""

    operations: Operations
    block_size: int
    paired: bool
    """True if this worker is paired with others; an unpaired worker computes every prompt itself."""
    groups: LayerGroups = ONE_GROUP
    counters: TransferCounters = field(default_factory=TransferCounters)

    def wants(self, request: Request) -> bool:
        """Return True if another worker should compute the prompt; tried once, before the first token."""
        if not self.paired or not request.spec.prefill_at or request.needs_every_position:
            return False
        if sum(len(image.pixels) for image in request.images) > MAX_JOB_PIXELS:
            return False
        return request.prefill is None and not request.num_generated

    def worth_fetching(self, request: Request, first: int) -> bool:
        """Return True if blocks remain to fetch after the `first` ones; the last token is always computed here."""
        if request.num_tokens - 1 - first * self.block_size >= self.block_size:
            return True
        self._is_over(request, "held")
        return False

    def fetch(self, request: Request, slot: int, tables: IntArray, first: int) -> None:
        """Lease the blocks after the `first` table entries of a slot to the worker that computes the prompt.

        `tables` is int32[groups, n]. Blocks of sliding groups that are read afterwards go to the first entries after
        them, see `SlotTable.arrive`.
        """
        spec, count, size = request.spec, request.num_tokens - 1, self.block_size
        sliding = len(self.groups.read_after(first, count, size))
        blocks = ordered_blocks(tables, self.groups, range(first, -(-count // size)), range(first, first + sliding))
        tokens = request.tokens.view(upto=count).astype("<i4", copy=False).tobytes()
        job = PrefillJob(
            tokens,
            first,
            spec.cache_salt,
            spec.priority,
            spec.tenant,
            spec.traceparent,
            adapter=spec.adapter,
            images=spec.images,
        )
        fetch = Fetch(self.operations.next, spec.prefill_at, job, blocks=blocks, slot=slot, request_id=spec.request_id)
        request.fetch = self.operations.begin(fetch, request, blocks)

    def cancel(self, request: Request) -> None:
        """Cancel the fetch of an aborted request; the leased blocks stay pinned until the lease ends."""
        if request.fetch is not None:
            self.operations.cancel(request.fetch)
            request.fetch = None
            self._is_over(request, "aborted")

    def fetched(self, answer: Fetched) -> tuple[Request, int, int] | None:
        """Finish a fetch; return its request, tokens in place and those not prefilled for it; None if it left."""
        fetch, request = self.operations.end(answer.operation, Fetch)
        if request is None:
            return None
        request.fetch = None
        self._is_over(request, answer.outcome)
        on_device, num_tokens = fetch.job.held_blocks * self.block_size, fetch.job.num_tokens
        if answer.outcome != "transferred":
            return request, on_device, on_device
        self.counters.fetched_tokens += num_tokens - on_device
        return request, num_tokens, max(on_device, min(answer.cached, num_tokens))

    def _is_over(self, request: Request, outcome: PrefillOutcome) -> None:
        request.prefill = outcome
        outcomes = self.counters.outcomes
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    def settled(self, request: Request, tables: IntArray, upto: int) -> None:
        """Send those of the leading `upto` entries of a prefill job's `tables`, all settled, that were not sent yet.

        `tables` is int32[groups, n]. Blocks of sliding groups are sent at the end, when it is known which are read.
        """
        job = request.spec.prefill_job
        if job is not None and upto > request.sent and self.groups.whole:
            self._send(request, job, tables, upto=upto, num_tokens=None)

    def finished(self, request: Request, tables: IntArray, reason: FinishReason) -> None:
        """Send the rest of a prefill job: its prompt is computed, with its KV in `tables` int32[groups, n]."""
        job = request.spec.prefill_job
        if job is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            prompt = request.prompt_len
            self._send(request, job, tables, upto=-(-prompt // self.block_size), num_tokens=prompt)
            request.sent_all = True

    def ended(self, request: Request, reason: FinishReason) -> None:
        """End the prefill job of a request with any finish reason."""
        job = request.spec.prefill_job
        if job is not None and not request.sent_all:
            self.operations.effects.append(
                AbandonLease(job.lease, f"the prefill worker ended the request: {reason.value}")
            )

    def _send(self, request: Request, job: PrefillJob, tables: IntArray, *, upto: int, num_tokens: int | None) -> None:
        groups, held, first = self.groups, job.held_blocks, min(request.sent, upto)
        sliding = range(0) if num_tokens is None else groups.read_after(held, num_tokens, self.block_size)
        sent = ordered_blocks(tables, groups, range(first, upto), sliding)
        index = held + groups.whole * (first - held)
        send = Send(self.operations.next, job.lease, index, sent, num_tokens, request.cached_tokens or 0)
        self.operations.begin(send, request, sent)
        self.counters.sent_blocks += len(sent)
        request.sent = upto
