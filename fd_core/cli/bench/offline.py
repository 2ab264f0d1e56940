"""`fdcore bench latency` and `fdcore bench throughput`: the engine alone, through `fd_core.LLM`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fd_core.cli.bench.results import RequestTimes
from fd_core.types import Delta, SamplingParams

if TYPE_CHECKING:
    from fd_core.engine.llm import LLM

__all__ = ["generate"]


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], output_tokens: int, ended: Callable[[], None]
) -> tuple[list[RequestTimes], float]:
    """Complete all prompts at once, greedily and to full length; return timelines and seconds."""

    def on_delta(_: int, delta: Delta) -> None:
        if delta.finish_reason is not None:
            ended()

    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    completions = llm.generate(list(prompts), params, on_delta=on_delta)
    duration = time.perf_counter() - begin
    timelines = [
        RequestTimes(
            sent=0.0,
            arrivals=tuple(completion.token_times),
            ended=completion.token_times[-1] if completion.token_times else duration,
            prompt_tokens=len(prompt),
            output_tokens=len(completion.token_ids),
        )
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return timelines, duration
