"""One streaming client for every server, so that all are measured alike: aiohttp, server-sent events, token prompts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp

from fd_core.cli.bench.compare.stats import RequestResult


class Dialect(Protocol):
    """Request format of a server, and parser of the events of its stream."""

    path: str

    def request(self, model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """Return the JSON body of a streamed, greedy request that ignores end-of-sequence."""

    def tokens(self, event: dict[str, Any]) -> list[int]:
        """Return the token ids that an event carries."""


class OpenAICompletions:
    """OpenAI's /v1/completions, with the `return_token_ids` extension that vLLM gave it."""

    path = "/v1/completions"

    def request(self, model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """See `Dialect`."""
        return {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }

    def tokens(self, event: dict[str, Any]) -> list[int]:
        """See `Dialect`."""
        return [t for choice in event.get("choices", ()) for t in choice.get("token_ids") or ()]


class LlamaServer:
    """llama-server's own /completion, which takes and returns token ids."""

    path = "/completion"

    def request(self, model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """See `Dialect`."""
        return {
            "prompt": list(prompt),
            "n_predict": max_tokens,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "return_tokens": True,
            "cache_prompt": True,
            "stream": True,
        }

    def tokens(self, event: dict[str, Any]) -> list[int]:
        """See `Dialect`."""
        return list(event.get("tokens") or ())


async def send_all(
    base_url: str, model: str, dialect: Dialect, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]
) -> tuple[float, list[RequestResult]]:
    """Send every prompt at once; return the wall seconds and the results in order of the prompts.

    Raises RuntimeError where a server answers with an error, aiohttp.ClientError where it cannot be reached.
    """
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=timeout) as session:
        start = time.perf_counter()
        results = await asyncio.gather(
            *(
                _send(session, dialect, dialect.request(model, prompt, tokens), start)
                for prompt, tokens in zip(prompts, max_tokens, strict=True)
            )
        )
        return time.perf_counter() - start, results


async def _send(session: aiohttp.ClientSession, dialect: Dialect, body: dict[str, Any], start: float) -> RequestResult:
    tokens: list[int] = []
    first = last = 0.0
    async with session.post(dialect.path, json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"the server answered with an error: {event['error']}")
            new = dialect.tokens(event)
            if new:
                last = time.perf_counter() - start
                first = first or last
                tokens.extend(new)
    return RequestResult(tuple(tokens), first, last)
