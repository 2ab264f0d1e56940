"""Test double for the effects of a scheduler: a dict of blocks whose operations a test completes.

Copies happen as late as the contract allows, at completion, and unloaded blocks hold garbage: a block that is used too
early, or without being loaded, changes a text.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.effects import operations
from fd_core.ops.contract import KVCache
from fd_core.testing.schedulers.scripts import kv_of
from fd_core.types import PrefillJob

PEER = "peer:1"
BAD_GRAMMAR = "it is wrong on purpose"
Operation = (
    operations.Lookup
    | operations.Load
    | operations.Save
    | operations.Fetch
    | operations.Send
    | operations.CompileGrammar
)


class OperationEnd(enum.Enum):
    """Outcome of an operation."""

    WELL = enum.auto()
    IN_PART = enum.auto()
    BADLY = enum.auto()

    def share(self, count: int) -> int:
        return {OperationEnd.WELL: count, OperationEnd.IN_PART: count // 2, OperationEnd.BADLY: 0}[self]


class ScriptedTiers:
    """Performs no operation until requested."""

    def __init__(self, cache: KVCache) -> None:
        self.values: dict[bytes, npt.NDArray[np.float32]] = {}
        self.begun: list[Operation] = []
        self.pending: list[Operation] = []
        """Operations that are not completed."""
        self.cancelled: set[int] = set()
        self._cache = cache

    def perform(self, effects: Iterable[operations.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, operations.Cancel):
                self.cancelled.add(effect.operation)
            elif isinstance(effect, operations.Lookup | operations.Load | operations.Save | operations.CompileGrammar):
                self._begin(effect)

    def _begin(self, operation: Operation) -> None:
        self.begun.append(operation)
        self.pending.append(operation)

    def complete(self, index: int, how: OperationEnd) -> operations.Completion:
        """Complete the operation at `index`; the test chooses the order."""
        return self.end(self.pending.pop(index), how)

    def end(self, operation: Operation, how: OperationEnd) -> operations.Completion:
        match operation:
            case operations.Lookup(number, keys=keys):
                total = how.share(sum(1 for _ in takewhile(self.values.__contains__, keys)))
                return operations.Found(number, total // 2, total)
            case operations.Load():
                return self._load(operation, how)
            case operations.Save():
                return self._save(operation, how)
            case operations.CompileGrammar(number):
                return operations.GrammarReady(number, BAD_GRAMMAR if how is OperationEnd.BADLY else None)
        raise TypeError(f"no test double performs {operation}")

    @property
    def block_size(self) -> int:
        return self._cache.shape.block_size

    def write(self, blocks: Sequence[int], data: npt.NDArray[np.float32]) -> None:
        self._cache.import_blocks(np.array(blocks, np.int32), data)

    def spoil(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            garbage = self._cache.export_blocks(np.array([block], np.int32)).copy()
            garbage.reshape(-1)[:] = 1.5
            self.write([block], garbage)

    def _load(self, load: operations.Load, how: OperationEnd) -> operations.Loaded:
        assert len(set(load.blocks.tolist())) == len(load.keys)
        held = list(takewhile(self.values.__contains__, load.keys[: how.share(len(load.keys))]))
        count = len(held)
        for key, block in zip(held, load.blocks[:count].tolist(), strict=True):
            self.write([block], self.values[key])
        self.spoil(load.blocks[count:].tolist())
        return operations.Loaded(load.operation, count, from_host=count // 2)

    def _save(self, save: operations.Save, how: OperationEnd) -> operations.Saved:
        upto = how.share(len(save.keys))
        for key, block in zip(save.keys[:upto], save.blocks[:upto].tolist(), strict=True):
            self.values[key] = self._cache.export_blocks(np.array([block], np.int32))
        # Copied blocks may be evicted at once, even if they are not stored yet.
        return operations.Saved(save.operation, upto, host=upto if how is OperationEnd.WELL else upto // 2)


def wanted_blocks(job: PrefillJob, groups: LayerGroups, block_size: int) -> list[tuple[int, int]]:
    """Return table entry and group of the blocks that a decode worker wants, in their order."""
    held, tokens = job.held_blocks, job.num_tokens
    return [*groups.order(range(held, -(-tokens // block_size)), groups.read_after(held, tokens, block_size))]


class ScriptedPeers(ScriptedTiers):
    """Test double for the other workers of a pair, in addition to the tiers.

    A block is read when its `Send` completes, a prompt is written when its `Fetch` does. Until then, and after a failed
    transfer, the leased blocks hold garbage.
    """

    def __init__(self, cache: KVCache, groups: LayerGroups = ONE_GROUP) -> None:
        super().__init__(cache)
        self._groups = groups

    def perform(self, effects: Iterable[operations.Effect]) -> None:
        for effect in effects:
            super().perform([effect])
            if isinstance(effect, operations.Fetch | operations.Send):
                self._begin(effect)
            if isinstance(effect, operations.Fetch):
                self.spoil(effect.blocks.tolist())

    def end(self, operation: Operation, how: OperationEnd) -> operations.Completion:
        match operation:
            case operations.Fetch(number):
                if how is not OperationEnd.WELL:
                    return operations.Fetched(number, "damaged" if how is OperationEnd.IN_PART else "lost")
                data = kv_of(operation.job.token_ids, self.block_size)
                entries = [entry for entry, _ in wanted_blocks(operation.job, self._groups, self.block_size)]
                self.write(operation.blocks.tolist(), data[entries])
                return operations.Fetched(number, "transferred")
            case operations.Send(number):
                return operations.Sent(number)
        return super().end(operation, how)
