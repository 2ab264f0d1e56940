"""vLLM's CPU build, in this process: requests go to its engine, which is stepped until all have finished."""

from __future__ import annotations

import time
from typing import Any

import vllm
from vllm import LLM, SamplingParams


class Engine:
    """vLLM's `LLM` with the defaults of its CPU build (compiled graph, prefix caching)."""

    def __init__(self, model: dict[str, str], threads: int, max_requests: int, max_length: int) -> None:
        self.version = vllm.__version__
        self.notes: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True}
        self._llm = LLM(
            model=model["folder"],
            dtype="bfloat16",
            max_model_len=max_length,
            max_num_seqs=max_requests,
            skip_tokenizer_init=True,
            seed=0,
        )
        self._next_id = 0

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], float, float]]:
        """Send all prompts, step until the engine is idle."""
        engine = self._llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        order = []
        for prompt in prompts:
            order.append(str(self._next_id))
            self._next_id += 1
            engine.add_request(order[-1], {"prompt_token_ids": prompt}, params)
        first: dict[str, float] = {}
        done: dict[str, tuple[list[int], float, float]] = {}
        while engine.has_unfinished_requests():
            outputs = engine.step()
            at = time.perf_counter()
            for output in outputs:
                first.setdefault(output.request_id, at)
                if output.finished:
                    tokens = list(output.outputs[0].token_ids)
                    done[output.request_id] = (tokens, first[output.request_id], at)
        return [done[name] for name in order]
