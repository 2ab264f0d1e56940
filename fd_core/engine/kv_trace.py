"""What a trace tells of KV outside the device: decisions, and operations with their times."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from fd_core.engine.trace import TraceWriter
from fd_core.engine.trace_format import Chosen, LoadEnded, SaveEnded
from fd_core.kv.effects import Completion, Effect, Load, Loaded, Save, Saved
from fd_core.scheduling.slots import SlotTable
from fd_core.scheduling.tradeoff import Choice

__all__ = ["KVTrace"]


class KVTrace:
    """Follows effects from their beginning to their completion. Used from the engine's thread."""

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

    def began(self, effects: Iterable[Effect], slots: SlotTable) -> None:
        """Note which operations begin, and for whom."""
        for effect in effects:
            match effect:
                case Load(operation, keys):
                    for slot in np.flatnonzero(slots.loading).tolist():
                        request = slots.requests[slot]
                        if request is not None and request.load == operation:
                            self._loads[operation] = (self._now(), slot, request.spec.request_id, len(keys))
                case Save(operation, keys):
                    self._saves[operation] = (self._now(), len(keys))

    def ended(self, completion: Completion) -> None:
        """Note how an operation ended."""
        match completion:
            case Loaded(operation, loaded, from_host) if operation in self._loads:
                began, slot, request_id, blocks = self._loads.pop(operation)
                entry = LoadEnded(began, self._now(), slot, request_id, blocks, min(loaded, blocks), from_host)
                self._trace.kept(entry)
            case Saved(operation, saved) if operation in self._saves:
                began, blocks = self._saves.pop(operation)
                self._trace.kept(SaveEnded(began, self._now(), blocks, min(saved, blocks)))

    def _now(self) -> int:
        return self._trace.clock(time.monotonic_ns())


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)
