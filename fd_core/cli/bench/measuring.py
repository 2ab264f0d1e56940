"""Requests of a benchmark, timed: through `fd_core.LLM`, or over HTTP as users of a server would send them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fd_core.cli.bench.results import RequestTimes
from fd_core.errors import FdError
from fd_core.types import Delta, SamplingParams

if TYPE_CHECKING:
    from fd_core.cli.bench.workload import Ask
    from fd_core.cli.chats.api_client import ApiClient
    from fd_core.engine.llm import LLM


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


async def measure(
    api: ApiClient,
    model: str,
    asks: Sequence[Ask],
    start_times: Sequence[float],
    *,
    concurrency: int | None,
    ignore_eos: bool,
    ended: Callable[[RequestTimes], None],
) -> tuple[list[RequestTimes], float]:
    """Send every request at its time and return their times and the seconds of the whole run.

    At most `concurrency` requests are open at once; `ended` is told of each as it ends.
    """
    gate = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
    begin = time.perf_counter()

    async def one(ask: Ask, at: float) -> RequestTimes:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        async with gate:
            timeline = await _send(api, model, ask, ignore_eos)
        ended(timeline)
        return timeline

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(ask, at)) for ask, at in zip(asks, start_times, strict=True)]
    return [task.result() for task in tasks], time.perf_counter() - begin


async def _send(api: ApiClient, model: str, ask: Ask, ignore_eos: bool) -> RequestTimes:
    path, body = ask.request(model, ignore_eos)
    sent = time.perf_counter()
    arrivals: list[float] = []
    prompt_tokens = output_tokens = 0
    error: str | None = None
    try:
        async with contextlib.aclosing(api.stream(path, body)) as chunks:
            async for chunk in chunks:
                if chunk.text:
                    arrivals.append(chunk.at)
                prompt_tokens = chunk.prompt_tokens or prompt_tokens
                output_tokens = chunk.completion_tokens or output_tokens
    except FdError as refusal:
        error = refusal.message
    return RequestTimes(
        sent=sent,
        arrivals=tuple(arrivals),
        ended=time.perf_counter(),
        prompt_tokens=prompt_tokens,
        # A server that reports no usage is counted by its pieces, which is what it sent at least.
        output_tokens=output_tokens or len(arrivals),
        error=error,
    )
