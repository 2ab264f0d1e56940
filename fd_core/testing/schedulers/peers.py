"""The other workers of a pair, played beside the tiers: transfers end when and as a test decides.

Copies are made as late as the contract allows: a block is read when its `Send` is answered, a prompt is written when
its `Fetch` is. Until then, and wherever a transfer fails, the leased blocks hold garbage.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from fd_core.effects.operations import Completion, Effect, Fetch, Fetched, Send, Sent
from fd_core.testing.schedulers.scripts import kv_of
from fd_core.testing.schedulers.tiers import Operation, OperationEnd, ScriptedTiers
from fd_core.testing.stepping.texts import greedy
from fd_core.types import PrefillJob, RequestSpec

_PEER = "peer:1"


def elsewhere(*specs: RequestSpec) -> list[RequestSpec]:
    """Return requests whose prompts another worker computes."""
    return [msgspec.structs.replace(spec, prefill_at=_PEER) for spec in specs]


def job_for(name: str, prompt: Iterable[int], held_blocks: int = 0) -> RequestSpec:
    """Return a request that computes a prompt for a worker which holds its first blocks; the lease has its name."""
    tokens = list(prompt)
    job = PrefillJob(np.array(tokens, "<i4").tobytes(), held_blocks, lease=name)
    return msgspec.structs.replace(greedy(name, tokens, 1), prefill_job=job)


class ScriptedPeers(ScriptedTiers):
    """Performs nothing until told to."""

    def perform(self, effects: Iterable[Effect]) -> None:
        """Begin operations."""
        for effect in effects:
            super().perform([effect])
            if isinstance(effect, Fetch | Send):
                self.pending.append(effect)
            if isinstance(effect, Fetch):
                self.spoil(effect.blocks.tolist())

    def end(self, operation: Operation, how: OperationEnd) -> Completion:
        """End an operation that began before."""
        match operation:
            case Fetch(number):
                if how is not OperationEnd.WELL:
                    return Fetched(number, "damaged" if how is OperationEnd.IN_PART else "lost")
                data = kv_of(operation.job.token_ids, self.block_size)[operation.job.held_blocks :]
                self.write(operation.blocks.tolist(), data)
                return Fetched(number, "transferred")
            case Send(number):
                return Sent(number)
        return super().end(operation, how)
