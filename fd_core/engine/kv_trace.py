"""What a trace tells of KV outside the device: decisions, and operations with their times."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from fd_core.engine.trace import TraceWriter
from fd_core.engine.trace_format import Chosen, LoadEnded, SaveEnded
from fd_core.kv.effects import Completion, Effect, Fetch, Fetched, Load, Loaded, Save, Saved, Transfer, Transferred
from fd_core.scheduling.slots import SlotTable
from fd_core.scheduling.tradeoff import Choice

__all__ = ["KVTrace"]


class KVTrace:
    """Follows effects from their beginning to their completion. Used from the engine's thread.

    One follows the operations of one owner, tiers or transfers: their numbers are their own.
    """

    def __init__(self, trace: TraceWriter) -> None:
        self._trace = trace
        self._loads: dict[int, tuple[int, int, str, int]] = {}
        """By operation: when it began, slot, request and blocks."""
        self._saves: dict[int, tuple[int, int]] = {}

    def decided(self, choices: Iterable[Choice]) -> None:
        """Note what was to be loaded and what to be computed."""
        for choice in choices:
            self._trace.kept(
                Chosen(
                    self._now(),
                    choice.request_id,
                    choice.load,
                    choice.host_blocks,
                    choice.store_blocks,
                    choice.tokens,
                    _microseconds(choice.load_seconds),
                    _microseconds(choice.recompute_seconds),
                )
            )

    def began(self, effects: Iterable[Effect | Transfer], slots: SlotTable) -> None:
        """Note which operations begin, and for whom."""
        for effect in effects:
            match effect:
                case Load(operation, keys):
                    self._load_began(operation, len(keys), slots)
                case Fetch(operation):
                    self._load_began(operation, len(effect.blocks), slots)
                case Save(operation, keys):
                    self._saves[operation] = (self._now(), len(keys))

    def _load_began(self, operation: int, blocks: int, slots: SlotTable) -> None:
        for slot in np.flatnonzero(slots.loading).tolist():
            request = slots.requests[slot]
            if request is not None and operation in (request.load, request.fetch):
                self._loads[operation] = (self._now(), slot, request.spec.request_id, blocks)

    def ended(self, completion: Completion | Transferred) -> None:
        """Note how an operation ended."""
        match completion:
            case Loaded(operation, loaded, from_host) if operation in self._loads:
                began, slot, request_id, blocks = self._loads.pop(operation)
                entry = LoadEnded(began, self._now(), slot, request_id, blocks, min(loaded, blocks), from_host)
                self._trace.kept(entry)
            case Fetched(operation, outcome) if operation in self._loads:
                began, slot, request_id, blocks = self._loads.pop(operation)
                loaded = blocks if outcome == "transferred" else 0
                self._trace.kept(LoadEnded(began, self._now(), slot, request_id, blocks, loaded, 0))
            case Saved(operation, saved) if operation in self._saves:
                began, blocks = self._saves.pop(operation)
                self._trace.kept(SaveEnded(began, self._now(), blocks, min(saved, blocks)))

    def _now(self) -> int:
        return self._trace.clock(time.monotonic_ns())


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)
