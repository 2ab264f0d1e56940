"""What a trace tells of KV outside the device: decisions, and operations with their times."""

from __future__ import annotations

from collections.abc import Callable

from fd_core.effects.operations import Cancel, Completion, Effects, Fetch, Fetched, Load, Loaded, Save, Saved
from fd_core.engine.tracing.format import DecisionEntry, KVEntry, LoadEntry, SaveEntry


class KVTrace:
    """Follows effects from their beginning to their completion. Used from the engine's thread."""

    def __init__(self, now: Callable[[], int]) -> None:
        """`now` returns the time as lines have it."""
        self.entries: list[KVEntry] = []
        """What happened since the last line."""
        self.loading: dict[int, int] = {}
        """Slots that wait for their KV, by operation; without those of aborted requests."""
        self._now = now
        self._open: dict[int, tuple[int, Load | Fetch | Save]] = {}
        """Operations in flight, with the time at which each began."""

    def began(self, effects: Effects) -> None:
        """Note what was decided, which operations begin, and which requests wait for them."""
        for decision in effects.decisions:
            self.entries.append(
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
        for effect in effects.operations:
            match effect:
                case Load(operation) | Fetch(operation):
                    self._open[operation] = self._now(), effect
                    self.loading[operation] = effect.slot
                case Save(operation):
                    self._open[operation] = self._now(), effect
                case Cancel(operation):
                    self.loading.pop(operation, None)

    def ended(self, completion: Completion) -> None:
        """Note how an operation ended."""
        if not isinstance(completion, Loaded | Fetched | Saved) or completion.operation not in self._open:
            return
        began, effect = self._open.pop(completion.operation)
        self.loading.pop(completion.operation, None)
        done, from_host, blocks = 0, 0, len(effect.blocks)
        match completion:
            case Loaded(_, done, from_host) | Saved(_, done, from_host):
                pass
            case Fetched(_, "transferred"):
                done = blocks
        done = min(done, blocks)
        if isinstance(effect, Save):
            self.entries.append(SaveEntry(began, self._now(), blocks, done))
        else:
            self.entries.append(LoadEntry(began, self._now(), effect.slot, effect.request_id, blocks, done, from_host))


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)
