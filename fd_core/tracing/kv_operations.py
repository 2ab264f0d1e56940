"""What a trace tells of KV outside the device: decisions, and operations with their times."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fd_core.kv.effects import Cancel, Completion, Effects, Fetch, Fetched, Load, LoadDecision, Loaded, Save, Saved
from fd_core.tracing.format import DecisionEntry, LoadEntry, SaveEntry
from fd_core.tracing.writer import TraceWriter

__all__ = ["KVTrace"]


class KVTrace:
    """Follows effects from their beginning to their completion. Used from the engine's thread."""

    def __init__(self, trace: TraceWriter) -> None:
        self._trace = trace
        self._loads: dict[int, tuple[int, Load | Fetch]] = {}
        """Loads in flight by operation, with the time at which each began."""
        self._saves: dict[int, tuple[int, int]] = {}
        """Saves in flight by operation: the time at which each began, and its blocks."""
        self._abandoned: set[int] = set()
        """Loads in flight whose request was aborted: another request may hold the slot."""

    def _decided(self, decisions: Iterable[LoadDecision]) -> None:
        """Note which prefixes are to be loaded and which to be recomputed."""
        for decision in decisions:
            self._trace.note(
                DecisionEntry(
                    self._now(),
                    decision.request_id,
                    decision.load,
                    decision.host_blocks,
                    decision.store_blocks,
                    decision.num_tokens,
                    _microseconds(decision.load_seconds),
                    _microseconds(decision.recompute_seconds),
                )
            )

    def began(self, effects: Effects) -> None:
        """Note what was decided, which operations begin, and which requests wait for them."""
        self._decided(effects.decisions)
        for effect in effects.operations:
            match effect:
                case Load(operation) | Fetch(operation):
                    self._loads[operation] = (self._now(), effect)
                    self._trace.load_began(effect.slot)
                case Save(operation, keys):
                    self._saves[operation] = (self._now(), len(keys))
                case Cancel(operation) if operation in self._loads and operation not in self._abandoned:
                    self._abandoned.add(operation)
                    self._trace.load_over(self._loads[operation][1].slot)

    def ended(self, completion: Completion) -> None:
        """Note how an operation ended."""
        match completion:
            case Loaded(operation, loaded, from_host) if operation in self._loads:
                self._load_ended(operation, loaded, from_host)
            case Fetched(operation, outcome) if operation in self._loads:
                blocks = len(self._loads[operation][1].blocks)
                self._load_ended(operation, blocks if outcome == "transferred" else 0, 0)
            case Saved(operation, saved) if operation in self._saves:
                began, blocks = self._saves.pop(operation)
                self._trace.note(SaveEntry(began, self._now(), blocks, min(saved, blocks)))

    def _load_ended(self, operation: int, loaded: int, from_host: int) -> None:
        began, effect = self._loads.pop(operation)
        if operation in self._abandoned:
            self._abandoned.remove(operation)
        else:
            self._trace.load_over(effect.slot)
        blocks = len(effect.blocks)
        self._trace.note(
            LoadEntry(began, self._now(), effect.slot, effect.request_id, blocks, min(loaded, blocks), from_host)
        )

    def _now(self) -> int:
        return self._trace.clock(time.monotonic_ns())


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)
