"""fd_core as a library: its `LLM` on the CPU backend."""

from __future__ import annotations

import time
from typing import Any

import fd_core
from fd_core import LLM, SamplingParams

_COUNTERS = {
    "steps": "steps",
    "preemptions": "preemptions",
    "recomputed_tokens": "recomputed_tokens",
    "loaded_tokens": "loaded_tokens",
    "computed_tokens": "budget_used",
    "drafts_proposed": "drafts_proposed",
    "drafts_accepted": "drafts_accepted",
}
"""Our names of the engine's counters."""


class Engine:
    """fd_core's `LLM` in bf16 with the settings that `fdcore serve` would take by itself, except for `settings`."""

    def __init__(
        self, model: dict[str, str], threads: int, max_requests: int, max_length: int, **settings: Any
    ) -> None:
        self.version = fd_core.__version__
        self._llm = LLM(
            model["folder"],
            backend="cpu",
            dtype="bfloat16",
            num_threads=threads,
            max_num_seqs=max_requests,
            max_model_len=max_length,
            kv_cache_memory=2**30,
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
        before = self._llm.stats
        start = time.perf_counter()
        completions = self._llm.generate(prompts, params)
        after = self._llm.stats
        self.counters = {ours: getattr(after, name) - getattr(before, name) for ours, name in _COUNTERS.items()}
        return [(c.token_ids, start + c.token_times[0], start + c.token_times[-1]) for c in completions]
