"""A real `fdcore serve` whose Redis server dies while it streams, and a second server that loads the stored blocks."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai

from tests.faults.pressed import until
from tests.server.processes import Server, serving

REQUESTS = 12
TOKENS = 60
LONG = "".join(random.Random(5).choices("abcdefghijklmnop ", k=320))


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0)


def streamed(server: Server, prompt: str, begun: threading.Event) -> str:
    """Return the text of one stream; check that it ends completely."""
    text, reason = "", None
    for event in client(server).completions.create(
        model="null", prompt=prompt, max_tokens=TOKENS, temperature=0.0, stream=True, extra_body={"ignore_eos": True}
    ):
        text += event.choices[0].text
        reason = event.choices[0].finish_reason or reason
        begun.set()
    assert reason == "length"
    return text


def test_streams_survive_a_redis_crash_and_stored_blocks_are_reused(
    redis_server: Any, secret: Path, tmp_path: Path
) -> None:
    numbers = random.Random(3)
    prompts = ["".join(numbers.choices("abcdefgh ", k=numbers.randint(20, 120))) for _ in range(REQUESTS)]
    arguments = (
        *("null", "--backend", "null", "--max-model-len", "400", "--block-size", "16", "--num-kv-blocks", "26"),
        *("--max-num-batched-tokens", "64", "--kv-store-secret-file", str(secret), "--log-level", "warning"),
        *("--host-kv-memory", "1024"),
    )
    store = ("--kv-store", f"redis+unix://{redis_server.socket}", "--kv-store-timeout", "5")

    def ask_all(server: Server, meanwhile: Any = None) -> list[str]:
        begun = threading.Event()
        with ThreadPoolExecutor(REQUESTS) as threads:
            answers = [threads.submit(streamed, server, prompt, begun) for prompt in prompts]
            assert begun.wait(30)
            if meanwhile is not None:
                meanwhile()
            return [answer.result() for answer in answers]

    with serving(tmp_path / "first.log", *arguments, *store) as server:
        texts = ask_all(server)
        assert ask_all(server, redis_server.kill) == texts
        assert ask_all(server) == texts
        until(lambda: server.metrics()["kv_store_failures_total[unreachable][unreachable]"] > 0, 5.0)
        metrics = server.metrics()
        assert metrics["engine_finished_total[error]"] == 0
        redis_server.start()
        written = metrics["kv_store_written_blocks_total"]

        def used_again() -> bool:
            completion = client(server).completions.create(model="null", prompt=LONG, max_tokens=4, temperature=0.0)
            assert completion.usage is not None and completion.usage.completion_tokens > 0
            assert ask_all(server) == texts
            return server.metrics()["kv_store_written_blocks_total"] > written

        until(used_again, 30.0)
        until(lambda: set(server.gauges().values()) == {0.0}, 5.0)
        first = client(server).completions.create(model="null", prompt=LONG + "!", max_tokens=4, temperature=0.0)
    with serving(tmp_path / "second.log", *arguments, *store) as server:
        again = client(server).completions.create(model="null", prompt=LONG + "!", max_tokens=4, temperature=0.0)
        assert again.choices[0].text == first.choices[0].text
        assert again.usage is not None and again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == 320
        until(lambda: server.metrics()["kv_loaded_tokens_total[store]"] == 320, 5.0)
