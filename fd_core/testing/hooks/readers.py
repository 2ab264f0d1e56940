"""The cases that every drafter has to pass that reads hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pytest

from fd_core.backends.null import NullModel
from fd_core.engine.core import Engine
from fd_core.testing.hooks.drafted import DrafterChoice, null_ops, small_engine
from fd_core.testing.hooks.heads import HeadedNull, PlayedRunner, WatchedDrafter, loaded
from fd_core.testing.hooks.purity import require_freed
from fd_core.testing.kit.growth import require_bounded
from fd_core.testing.kit.law import require
from fd_core.testing.models.texts import greedy, run
from fd_core.types import RequestSpec

_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "chunked": {"max_num_batched_tokens": 9, "k": 4},
    "preempted and saved": {"num_kv_blocks": 25},
    "preempted and computed again": {"num_kv_blocks": 25, "save_preempted_kv": False},
    "whole context": {"max_model_len": 48, "block_size": 5, "k": 6, "model": {"some_tokens": True}},
    "few rows": {"max_num_seqs": 2, "k": 1, "model": {"some_tokens": True, "vocab_size": 70_000}},
}


class ReadingDrafterSuite(DrafterChoice):
    """Derive a class `Test...` from it and name the drafter, which has `reads_states`."""

    @contextmanager
    def engine(
        self, k: int = 3, model: Mapping[str, Any] = MappingProxyType({}), **settings: Any
    ) -> Iterator[tuple[Engine, WatchedDrafter]]:
        """Start an engine with the scripted head and the drafter."""
        with loaded(HeadedNull(**model)) as headed, small_engine(k, **settings) as engine:
            runner: Any = engine.probe().runner
            runner.drafter = watched = WatchedDrafter(self.subject(), runner, headed.draft_head)
            yield engine, watched

    @pytest.mark.law("1.1", "1.9", "4", "8")
    @pytest.mark.parametrize("setting", _SETTINGS)
    def test_drafts_and_texts_depend_on_the_text_alone(self, setting: str) -> None:
        """Serve requests, two with the same prompt, compare drafts with those of a new drafter, and texts."""
        what = "`reads_states` is not set, so no head is loaded, and `read` is never called"
        require(self.drafter_class().reads_states, "8", what)
        specs = _specs()
        vocab_size = _SETTINGS[setting].get("model", {}).get("vocab_size", 257)
        with loaded(NullModel(vocab_size)), small_engine(0, num_kv_blocks=400) as plain:
            right = run(plain, specs).tokens
        with self.engine(**_SETTINGS[setting]) as (engine, watched):
            for _ in range(2):  # from the cache of prefixes, too
                found = run(engine, specs).tokens
                others = [name for name in right if found[name] != right[name]]
                require(not others, "4", f"{others} have other texts")
            stats = engine.stats().scheduler
            assert (stats.counters.preemptions > 0) is setting.startswith("preempted")
            accepted, proposed = stats.drafts.accepted, stats.drafts.proposed
        # The head is right about every second token.
        require(20 * accepted >= max(proposed, 1), "8", f"{accepted} of {proposed} drafts are the model's tokens")
        compared, expected = watched.counts.tolist()
        what = f"{compared} drafts, where new drafters with the same texts have {expected}"
        require(2 * compared >= expected, "8", what)

    @pytest.mark.law("8")
    def test_memory_of_past_requests_is_freed(self) -> None:
        runner = PlayedRunner(self.subject(), 2, 3, longest=64)
        slots = np.arange(2, dtype=np.int32)

        def use(number: int) -> None:
            for slot in slots.tolist():
                runner.start(slot, [number % 250, *range(20 + slot)])
            runner.step(slots, np.zeros(2, np.int32), 7)
            runner.step(slots, np.array([21, 22], np.int32), 8)

        require_bounded(use, 50, "requests")
        require_freed(lambda: (self.subject().new(4, 4, ops=(ops := null_ops())), ops))


def _specs() -> list[RequestSpec]:
    """Return requests, of which the last has the prompt of the first, and some sample."""
    texts = [[7, 8, 9, number] * (7 - number) for number in range(6)]
    return [
        greedy(f"r{number}", text, 20, temperature=float(number % 2), seed=number)
        for number, text in enumerate([*texts, texts[0]])
    ]
