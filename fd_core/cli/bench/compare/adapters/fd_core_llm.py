"""fd_core as a library: its `LLM` on the CPU backend."""

from __future__ import annotations

import time
from operator import attrgetter
from typing import Any

import fd_core
from fd_core import LLM, SamplingParams

_COUNTERS = {
    "steps": attrgetter("scheduler.counters.steps"),
    "preemptions": attrgetter("scheduler.counters.preemptions"),
    "recomputed_tokens": attrgetter("scheduler.counters.recomputed_tokens"),
    "loaded_tokens": attrgetter("scheduler.offload.loaded_tokens"),
    "computed_tokens": attrgetter("scheduler.counters.budget_used"),
    "drafts_proposed": attrgetter("scheduler.drafts.proposed"),
    "drafts_accepted": attrgetter("scheduler.drafts.accepted"),
}
"""Counters that the reports show, and where `EngineStats` has them."""


class FdCoreLibrary:
    """fd_core's `LLM` with the defaults of `fdcore serve`, except for bf16 and `settings`."""

    def __init__(
        self,
        model: str,
        threads: int,
        max_requests: int,
        max_length: int,
        **settings: Any,
    ) -> None:
        self.version = fd_core.__version__
        self._llm = LLM(
            model,
            backend="cpu",
            dtype="bfloat16",
            num_threads=threads,
            max_num_seqs=max_requests,
            max_model_len=max_length,
            kv_cache_memory=2**29,  # enough for 32 requests, and little enough for the warm-up to touch its pages
            **settings,
        )
        info = self._llm.info
        self.notes: dict[str, Any] = {
            "dtype": info.dtype,
            "device": info.device,
            "kv_cache_bytes": info.kv_cache_bytes,
            **settings,
        }
        self.counters: dict[str, int] = {}

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> list[tuple[list[int], float, float]]:
        """Generate for all prompts; the engine notes when it delivered each token."""
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in max_tokens]
        before = _counts(self._llm.stats)
        start = time.perf_counter()
        completions = self._llm.generate(prompts, params)
        after = _counts(self._llm.stats)
        self.counters = {name: after[name] - before[name] for name in after}
        return [(c.token_ids, start + c.token_times[0], start + c.token_times[-1]) for c in completions]


def _counts(stats: Any) -> dict[str, int]:
    try:
        return {name: counter(stats) for name, counter in _COUNTERS.items()}
    except AttributeError:  # other versions have other names
        return {}


library = FdCoreLibrary
