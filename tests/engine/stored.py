"""What performs effects in tests: a dict of blocks whose operations end when and as a test decides.

Copies are made as late as the contract allows, at the completion, and what a load leaves behind is garbage: a block
that somebody else uses too early, or uses although it was not loaded, changes a text.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fd_core.kv.effects import Cancel, Completion, Effect, Found, Load, Loaded, Lookup, Save, Saved
from fd_core.ops.contract import KVCache
from fd_core.scheduling.kv_offloading import KeepKV
from tests.engine.stepping import How, Stepper

__all__ = ["ScriptedTiers", "keep_kv"]


class ScriptedTiers:
    """Performs nothing until told to."""

    def __init__(self, cache: KVCache) -> None:
        self.values: dict[bytes, np.ndarray] = {}
        self.pending: list[Lookup | Load | Save] = []
        self.cancelled: set[int] = set()
        self._cache = cache

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Cancel):
                self.cancelled.add(effect.operation)
            elif isinstance(effect, Lookup | Load | Save):
                self.pending.append(effect)

    def complete(self, index: int, how: How) -> Completion:
        """End the operation at `index`; the order of operations is the test's choice."""
        operation = self.pending.pop(index)
        match operation:
            case Lookup():
                return self._find(operation, how)
            case Load():
                return self._load(operation, how)
            case Save():
                return self._save(operation, how)

    def _find(self, lookup: Lookup, how: How) -> Found:
        held = 0
        while held < len(lookup.keys) and lookup.keys[held] in self.values:
            held += 1
        total = {How.WELL: held, How.IN_PART: held // 2, How.BADLY: 0}[how]
        return Found(lookup.operation, total // 2, total)

    def _load(self, load: Load, how: How) -> Loaded:
        assert len(set(load.blocks.tolist())) == len(load.keys)
        upto = {How.WELL: len(load.keys), How.IN_PART: len(load.keys) // 2, How.BADLY: 0}[how]
        count = 0
        while count < upto and load.keys[count] in self.values:
            self._cache.import_blocks(load.blocks[count : count + 1], self.values[load.keys[count]])
            count += 1
        for block in load.blocks[count:]:
            garbage = self._cache.export_blocks(np.array([block], np.int32)).copy()
            garbage.reshape(-1)[:] = 1.5
            self._cache.import_blocks(np.array([block], np.int32), garbage)
        return Loaded(load.operation, count, from_host=count // 2)

    def _save(self, save: Save, how: How) -> Saved:
        upto = {How.WELL: len(save.keys), How.IN_PART: len(save.keys) // 2, How.BADLY: 0}[how]
        for key, block in zip(save.keys[:upto], save.blocks[:upto].tolist(), strict=True):
            self.values[key] = self._cache.export_blocks(np.array([block], np.int32))
        # What was copied may be evicted by other requests at once, whatever the store has of it.
        return Saved(save.operation, upto, host=upto if how is How.WELL else upto // 2)


def keep_kv(
    stepper: Stepper, *, preempted: bool = True, finished: bool = False, persist: bool = False
) -> ScriptedTiers:
    """Let the stepper's scheduler keep KV outside the device, in tiers that the test plays."""
    stepper.probe.offloading.keep = KeepKV(preempted, finished, persist)
    stepper.tiers = ScriptedTiers(stepper.runner.cache)
    return stepper.tiers
