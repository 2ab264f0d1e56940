"""The kit's stepper on the null backend, whose cache is transparent: blocks must hold what the prefix index claims.

It also audits KV offload, in tiers that the test scripts.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from fd_core.backends.null import NullModel, running_hashes
from fd_core.effects.operations import Effects, Load
from fd_core.engine.core import Engine
from fd_core.kv.prefix import PrefixHasher
from fd_core.testing.models import stepper as stepping
from fd_core.testing.models.drafting import speculation
from fd_core.testing.models.small import SMALL
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.tiers import OperationEnd as How
from fd_core.testing.schedulers.tiers import ScriptedTiers
from fd_core.types import RequestSpec
from tests.engine.helpers import null_engine
from tests.engine.knowing import OracleDrafter

__all__ = ["SMALL", "How", "Stepper", "greedy", "scripted", "small_engine"]


def small_engine(specs: list[RequestSpec], k: int = 0, wrong: float = 0.0, seed: int = 0, **settings: Any) -> Engine:
    """A small engine; with k > 0 its drafter knows the texts of `specs`."""
    values: dict[str, Any] = {**SMALL, "speculative": speculation(k), **settings}
    engine = null_engine(**values)
    if k:
        engine.probe().runner.drafter = OracleDrafter(values["max_num_seqs"], specs, wrong, seed)
    return engine


def scripted(spec: RequestSpec) -> list[int]:
    """Return the greedy text of a request straight from the model: no scheduler, no runner, no cache."""
    model = NullModel()
    ends = {*spec.params.stop_token_ids, *(() if spec.params.ignore_eos else spec.eos_token_ids)}
    state = running_hashes(np.uint64(0), np.array(spec.prompt, np.int32))[-1]
    text: list[int] = []
    while len(text) < spec.params.max_tokens and not (text and text[-1] in ends):
        text.append(int(np.argmax(model.head(np.array([[state]]))[0])))
        state = running_hashes(state, np.array(text[-1:], np.int32))[-1]
    return text


class Stepper(stepping.Stepper):
    """Plans, executes and commits one step at a time, with an audit after each."""

    def __init__(self, engine: Engine, *, eager: bool = False) -> None:
        """`eager` admits every request that fits, without a reserve: many more preemptions."""
        super().__init__(engine, eager=eager)
        self.tiers: ScriptedTiers | None = None
        self._ways = itertools.cycle(How)

    def perform(self, effects: Effects) -> None:
        """Pass the scheduler's operations to the scripted tiers."""
        if self.tiers is not None:
            self.tiers.perform(effects.operations)

    def flush(self) -> None:
        """Pass on at once what the next plan or commit would return."""
        self.perform(Effects(*self.probe.operations.take()))

    def complete(self, index: int, how: How) -> None:
        """End an operation outside steps."""
        assert self.tiers is not None
        self.scheduler.complete(self.tiers.complete(index, how))
        self.audit()

    def meanwhile(self) -> bool:
        """End one operation outside steps, if any is open."""
        if self.tiers is None or not self.tiers.pending:
            return False
        self.complete(0, next(self._ways))
        return True

    # Audits -----------------------------------------------------------------------------------------------

    def audit(self) -> None:
        super().audit()
        if self.tiers is not None:
            self._check_operations(self.probe.pool.free_blocks())
        for slot in np.flatnonzero(self.probe.slots.running).tolist():
            self._check_settled(slot)

    def _check_operations(self, free: set[int]) -> None:
        """Check that an operation owns its blocks and that no step touches a block being loaded."""
        assert self.tiers is not None
        for operation in self.tiers.pending:
            blocks = set(getattr(operation, "blocks", np.empty(0)).tolist())
            assert not blocks & free, "a block is free while an operation reads or writes it"
            if isinstance(operation, Load):
                assert not any(blocks & touched for touched in self._touched.values())

    def _check_settled(self, slot: int) -> None:
        """Check that blocks registered by a slot are settled, hashed from the known tokens, and in the cache."""
        slots, size = self.probe.slots, self.limits.block_size
        known = int(slots.num_tokens[slot])
        assert slots.num_registered[slot] * size <= known <= slots.limit[slot]
        hasher, request = self.probe.prefixes.hasher, slots.requests[slot]
        if hasher is None or request is None or not slots.num_registered[slot]:
            return
        tokens = request.tokens.view()
        assert request.chain[: known // size] == _keys(hasher, request.root, tokens)[: len(request.chain)]
        hashes = running_hashes(np.uint64(0), tokens)[size - 1 :: size]
        held = self.runner.cache.layer(0)[slots.tables[0, slot, : slots.num_registered[slot]], size - 1]
        assert held.tolist() == hashes[: slots.num_registered[slot]].tolist(), (
            "a registered prefix is not in its blocks"
        )


def _keys(hasher: PrefixHasher, root: bytes, tokens: Any) -> list[bytes]:
    chain: list[bytes] = []
    hasher.extend(chain, root, tokens, len(tokens))
    return chain
