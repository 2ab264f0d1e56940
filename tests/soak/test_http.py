"""A real server under memory pressure: concurrent streams, a pool that holds about eight, clients that disconnect.

Part of `nox -s soak`. A failure prints the seed.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from fd_core.engine.tracing.reader import read_trace
from tests.server.processes import Server, serving

pytestmark = pytest.mark.soak

SEED = int(os.environ.get("FD_SOAK_SEED", "20261121"))
REQUESTS = 96
BLOCK_SIZE = 16
BLOCKS = 40
BUDGET = 256
SERVE = (
    *("smollm2", "--backend", "cpu", "--max-model-len", "256", "--block-size", str(BLOCK_SIZE)),
    *("--max-num-batched-tokens", str(BUDGET), "--log-level", "warning"),
)


@dataclass(slots=True)
class Answer:
    """Data that a client read before it disconnected or the stream ended."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def bodies() -> list[dict[str, Any]]:
    """Return prompts of repeated phrases, for n-gram drafts; a few answers are long."""
    rng = np.random.default_rng(SEED)
    requests = []
    for index in range(REQUESTS):
        phrase = rng.integers(1000, 20000, int(rng.integers(3, 12))).tolist()
        longest = 160 if index % 5 == 0 else 40
        requests.append(
            {
                "model": "smollm2",
                "prompt": (phrase * 20)[: int(rng.integers(4, 60))],
                "max_tokens": int(rng.integers(longest // 2, longest)),
                "temperature": [0.0, 0.7, 1.2][index % 3],
                "top_p": 0.9 if index % 4 == 0 else 1.0,
                "seed": index,
                "ignore_eos": index % 5 == 0,
                "return_token_ids": True,
                "stream": True,
            }
        )
    return requests


async def ask(session: aiohttp.ClientSession, body: Mapping[str, Any], leave_after: int | None = None) -> Answer:
    """Stream an answer; disconnect after `leave_after` tokens, or at once for 0."""
    answer = Answer()
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        if leave_after == 0:
            response.close()
            return answer
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = json.loads(data)
            assert "error" not in event, event
            for choice in event["choices"]:
                answer.text += choice["text"]
                answer.token_ids += choice.get("token_ids") or []
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
            if leave_after is not None and len(answer.token_ids) >= leave_after and answer.finish_reason is None:
                response.close()
                return answer
    return answer


async def ask_all(server: Server, at_once: int, leaving: Mapping[int, int]) -> list[Answer]:
    """Send every request, at most `at_once` at a time; those in `leaving` disconnect after that many tokens."""
    gate = asyncio.Semaphore(at_once)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)

    async def one(session: aiohttp.ClientSession, index: int, body: Mapping[str, Any]) -> Answer:
        async with gate:
            return await ask(session, body, leaving.get(index))

    async with aiohttp.ClientSession(server.url, connector=connector, timeout=timeout) as session:
        return await asyncio.gather(*(one(session, index, body) for index, body in enumerate(bodies())))


@pytest.fixture(scope="module")
def unpressed(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """Answers of a server with room for all, without drafts, 16 requests at a time."""
    with serving(tmp_path_factory.mktemp("soak") / "unpressed.log", *SERVE, "--num-kv-blocks", "512") as server:
        answers = asyncio.run(ask_all(server, 16, {}))
        metrics = server.metrics()
    assert any("native" in name for name in metrics), "only the native kernels give the same bits in any batch"
    assert metrics["preemptions_total"] == 0
    assert all(answer.finish_reason in ("stop", "length") for answer in answers)
    return answers


@pytest.mark.parametrize("engine", ["process", "inproc"])
def test_streams_under_pressure_equal_those_without_pressure(
    unpressed: list[Answer], tmp_path: Path, engine: str
) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED + 1)
    leaving = {int(index): int(rng.integers(0, 12)) for index in rng.choice(REQUESTS, REQUESTS // 4, replace=False)}
    trace = tmp_path / "trace.jsonl"
    flags = (
        *("--num-kv-blocks", str(BLOCKS), "--max-num-seqs", "16", "--engine", engine, "--trace", str(trace)),
        *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    )
    with serving(tmp_path / "pressed.log", *SERVE, *flags) as server:
        before = server.gauges()
        answers = asyncio.run(ask_all(server, REQUESTS, leaving))
        deadline = time.monotonic() + 10
        while server.gauges() != before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.gauges() == before
        metrics = server.metrics()
    assert set(before.values()) == {0.0}
    for index, (answer, whole) in enumerate(zip(answers, unpressed, strict=True)):
        if answer.finish_reason is None:
            assert index in leaving
            assert answer.token_ids == whole.token_ids[: len(answer.token_ids)], index
            assert whole.text.startswith(answer.text), index
        else:
            assert answer == whole, index
    left = sum(answer.finish_reason is None for answer in answers)
    print(f"{left} left, {metrics['preemptions_total']:.0f} preemptions, {metrics['steps_total']:.0f} steps")
    assert 0 < left <= len(leaving)
    # A disconnected client's answer may already have been complete.
    assert 0 < metrics["engine_finished_total[abort]"] <= left
    assert metrics["engine_finished_total[error]"] == metrics["stale_outputs_total"] == 0
    assert metrics["preemptions_total"] > 0
    assert metrics["drafts_accepted_tokens_total"] > 0
    assert metrics["drafts_accepted_per_position_tokens_total[0]"] > 0
    assert metrics["budget_used_tokens_total"] <= metrics["budget_limit_tokens_total"]
    steps = read_trace(trace, 10**6)
    assert not steps.problems
    assert len(steps.positions) >= metrics["steps_total"]
    for position in steps.positions:
        assert position.line.budget <= BUDGET
        assert sum(position.line.kv[:2]) <= BLOCKS
    assert max(sum(position.line.kv[:2]) for position in steps.positions) > 0.8 * BLOCKS
