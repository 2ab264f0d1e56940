"""vLLM's CPU build, in this process: requests go to its engine, which is stepped until all have finished."""

from __future__ import annotations

import time
from typing import Any

import vllm
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput


class _Counting:
    """Wraps a scheduler's `schedule` and counts preemptions and recomputed tokens."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._schedule = scheduler.schedule
        self._furthest: dict[str, int] = {}
        self.start()
        scheduler.schedule = self

    def start(self) -> None:
        """Begin a run at zero."""
        self._furthest.clear()
        self.counters = dict.fromkeys(("steps", "preemptions", "recomputed_tokens", "computed_tokens"), 0)

    def __call__(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        plan: SchedulerOutput = self._schedule(*args, **kwargs)
        counters, furthest = self.counters, self._furthest
        counters["steps"] += bool(plan.num_scheduled_tokens)
        counters["preemptions"] += len(plan.preempted_req_ids or ())
        counters["computed_tokens"] += plan.total_num_scheduled_tokens
        for name, count in plan.num_scheduled_tokens.items():
            # `schedule` has advanced the request by what it planned.
            end = self._scheduler.requests[name].num_computed_tokens
            known = furthest.get(name, 0)
            counters["recomputed_tokens"] += max(0, min(known, end) - (end - count))
            furthest[name] = max(known, end)
        return plan


class VllmLibrary:
    """vLLM's `LLM` with the defaults of its CPU build (compiled graph, prefix caching), except for `settings`."""

    def __init__(self, model: str, threads: int, max_requests: int, max_length: int, **settings: Any) -> None:
        self.version = vllm.__version__
        self.notes: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True, **settings}
        self._llm = LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=max_length,
            max_num_seqs=max_requests,
            skip_tokenizer_init=True,
            seed=0,
            **settings,
        )
        # In this process, since the environment disables vLLM's engine process.
        self._counting = _Counting(self._llm.llm_engine.engine_core.engine_core.scheduler)
        self._next_id = 0

    @property
    def counters(self) -> dict[str, int]:
        """Counts of preemptions and computed tokens of the last run."""
        return self._counting.counters

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> list[tuple[list[int], float, float]]:
        """Send all prompts, step until the engine is idle."""
        engine = self._llm.llm_engine
        self._counting.start()
        order = []
        for prompt, count in zip(prompts, max_tokens, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
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


library = VllmLibrary
