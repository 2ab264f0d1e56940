"""Server-side latencies equal those seen by a client: preprocessing the prompt is included."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fd_core.text.chat_template import ChatTemplate
from fd_core.text.tokenizer import Tokenizer
from tests.server.fakes import LiveServer, samples

DELAY = 0.3
BODIES = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


def slow_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer.encode

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(DELAY)
        return encode(*args, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)


def slow_template(monkeypatch: pytest.MonkeyPatch) -> None:
    render = ChatTemplate.render

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(DELAY)
        return render(*args, **options)

    monkeypatch.setattr(ChatTemplate, "render", slow)


@pytest.mark.parametrize(
    "path, slow",
    [
        ("/v1/completions", slow_tokenizer),
        ("/v1/chat/completions", slow_tokenizer),
        ("/v1/chat/completions", slow_template),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.timing
def test_prompt_preprocessing_counts(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, slow: Any, stream: bool
) -> None:
    before = samples(server)
    slow(monkeypatch)
    began = time.perf_counter()
    assert server.post(path, {**BODIES[path], "stream": stream}).status == 200
    waited = time.perf_counter() - began
    after = samples(server)
    for name in ("time_to_first_token", "end_to_end"):
        assert after[f"fdcore_{name}_seconds_count"] == before.get(f"fdcore_{name}_seconds_count", 0) + 1
        measured = after[f"fdcore_{name}_seconds_sum"] - before.get(f"fdcore_{name}_seconds_sum", 0)
        assert DELAY <= measured <= waited
