"""Requests of a benchmark: synthetic or from a file, timed through `fd_core.LLM` or over HTTP as users send them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from fd_core.cli.bench.results import RequestTimes
from fd_core.errors import ConfigError, FdError
from fd_core.types import Delta, SamplingParams

if TYPE_CHECKING:
    from fd_core.cli.chats.api_client import ApiClient
    from fd_core.engine.llm import LLM


_WORDS: Final = tuple(
    """
    time year people way day man thing woman life child world school state family group country problem hand part
    place case week company system program question work number night point home water room mother area money story
    fact month lot right study book eye job word business issue side kind head house service friend father power
    hour game line
    """.split()
)
"""Common nouns: one token each in most vocabularies if preceded by a blank."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a benchmark."""

    prompt: str | list[dict[str, Any]]
    output_tokens: int

    def request(self, model: str, ignore_eos: bool) -> tuple[str, dict[str, Any]]:
        """Return the path and body of the request."""
        body = {"model": model, "max_tokens": self.output_tokens, "temperature": 0.0, "ignore_eos": ignore_eos}
        if isinstance(self.prompt, str):
            return "/v1/completions", {**body, "prompt": self.prompt}
        return "/v1/chat/completions", {**body, "messages": self.prompt}


def synthetic(count: int, input_tokens: int, output_tokens: int, seed: int) -> list[BenchRequest]:
    """Return prompts of about `input_tokens` tokens that share no prefix."""
    draw = random.Random(seed)  # noqa: S311 - not for security: a workload must be reproducible
    return [
        BenchRequest(
            " ".join([str(draw.randrange(10**6)), *draw.choices(_WORDS, k=max(input_tokens - 4, 0))]), output_tokens
        )
        for _ in range(count)
    ]


def synthetic_ids(count: int, input_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return prompts of `input_tokens` ids from the upper half of the vocabulary, without special tokens at its top."""
    draw = random.Random(seed)  # noqa: S311 - not for security: a workload must be reproducible
    low, high = vocab_size // 2, max(vocab_size * 9 // 10, vocab_size // 2 + 1)
    return [[draw.randrange(low, high) for _ in range(input_tokens)] for _ in range(count)]


def from_file(path: Path, count: int | None, output_tokens: int) -> list[BenchRequest]:
    """Read one request per line: `prompt` or `messages`, optionally `max_tokens`. `ConfigError` names the line."""
    asks: list[BenchRequest] = []
    try:
        with path.open("rb") as file:
            while (count is None or len(asks) < count) and (line := file.readline(1 << 24)):
                if line.strip():
                    asks.append(_ask(line, output_tokens, f"{path}, line {len(asks) + 1}"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="--dataset") from error
    if not asks:
        raise ConfigError(f"{path} contains no requests", field="--dataset")
    return asks


def _ask(line: bytes, output_tokens: int, where: str) -> BenchRequest:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}", field="--dataset") from error
    prompt = (row.get("messages") or row.get("prompt")) if isinstance(row, dict) else None
    wanted = row.get("max_tokens", output_tokens) if isinstance(row, dict) else None
    if not isinstance(prompt, str | list) or not prompt:
        raise ConfigError(f"{where}: expected `prompt` or `messages`", field="--dataset")
    if type(wanted) is not int or wanted < 1:
        raise ConfigError(f"{where}: max_tokens is {wanted!r}; expected a number above 0", field="--dataset")
    return BenchRequest(prompt, wanted)


def arrivals(count: int, per_second: float | None, seed: int) -> list[float]:
    """Return the start time of each request, in seconds: all at once, or as a Poisson process of that rate."""
    if per_second is None:
        return [0.0] * count
    draw = random.Random(seed)  # noqa: S311 - not for security: a workload must be reproducible
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(per_second)
    return times


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
    asks: Sequence[BenchRequest],
    start_times: Sequence[float],
    concurrency: int | None,
    *,
    ignore_eos: bool,
    ended: Callable[[], None],
) -> tuple[list[RequestTimes], float]:
    """Send each request at its time, `concurrency` at once; return times and seconds. `ended` is called at each end."""
    gate = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
    begin = time.perf_counter()

    async def one(ask: BenchRequest, at: float) -> RequestTimes:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        async with gate:
            timeline = await _send(api, model, ask, ignore_eos=ignore_eos)
        ended()
        return timeline

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(ask, at)) for ask, at in zip(asks, start_times, strict=True)]
    return [task.result() for task in tasks], time.perf_counter() - begin


async def _send(api: ApiClient, model: str, ask: BenchRequest, ignore_eos: bool) -> RequestTimes:
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
        # If a server reports no usage, its chunks are counted, a lower bound of its tokens.
        output_tokens=output_tokens or len(arrivals),
        error=error,
    )
