"""fd_core as a library: its `LLM` on the CPU backend."""

from __future__ import annotations

import time
from typing import Any

import fd_core
from fd_core import LLM, SamplingParams


class Engine:
    """fd_core's `LLM` in bf16 with the settings that `fdcore serve` would take by itself."""

    def __init__(self, model: dict[str, str], threads: int, max_requests: int, max_length: int) -> None:
        self.version = fd_core.__version__
        self._llm = LLM(
            model["folder"],
            backend="cpu",
            dtype="bfloat16",
            num_threads=threads,
            max_num_seqs=max_requests,
            max_model_len=max_length,
            kv_cache_memory=2**30,
        )
        info = self._llm.info
        self.notes: dict[str, Any] = {"dtype": info.dtype, "device": info.device, "kv_cache_bytes": info.kv_cache_bytes}

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], float, float]]:
        """Generate for all prompts; the engine notes when it delivered each token."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        completions = self._llm.generate(prompts, params)
        return [(c.token_ids, start + c.token_times[0], start + c.token_times[-1]) for c in completions]
