"""No request stops the event loop, and so every stream and /health, for more than 50 ms, whatever it holds."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fd_core.server.listening import settle
from tests.hostile.event_loop import LONGEST_STALL, post, stall
from tests.server.fakes import FakeClient, LiveServer, live

MB = 2**20
MOST = 16 * MB
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def repeated(head: bytes, piece: bytes, tail: bytes, size: int = MOST) -> bytes:
    """As many pieces between commas as `size` bytes hold."""
    count = (size - len(head) - len(tail)) // (len(piece) + 1)
    return head + b",".join([piece] * count) + tail


def fields(count: int) -> bytes:
    return b",".join(b'"a%d":0' % index for index in range(count))


MESSAGE = b'{"messages":[{"role":"user","content":'
BODIES = {
    "a text that no context holds": (COMPLETIONS, b'{"prompt":"%b"}' % (b"a" * (MOST - 20)), 400),
    "a text of escapes": (COMPLETIONS, b'{"prompt":"%b"}' % (b"\\u0041" * (MOST // 6 - 20)), 400),
    "millions of ids": (COMPLETIONS, repeated(b'{"prompt":[', b"1", b"]}"), 400),
    "millions of lists": (COMPLETIONS, repeated(b'{"prompt":[', b"[1]", b"]}"), 400),
    "unknown fields": (COMPLETIONS, b'{"prompt":"x",%b}' % fields(1_300_000), 400),
    "fewer unknown fields": (COMPLETIONS, b'{"prompt":"x",%b}' % fields(60_000), 400),
    "content parts": (CHAT, repeated(MESSAGE + b"[", b'{"type":"text","text":"x"}', b"]}]}"), 400),
    "messages": (CHAT, repeated(b'{"messages":[', b'{"role":"user","content":"x"}', b"]}"), 400),
    "empty messages": (CHAT, repeated(b'{"messages":[', b"{}", b"]}"), 400),
    "a text of brackets": (CHAT, MESSAGE + b'"%b"}]}' % (b"[{,:" * MB), 400),
    "deep lists": (COMPLETIONS, b'{"prompt":' + b"[" * (8 * MB), 400),
    "tools": (CHAT, repeated(MESSAGE + b'"x"}],"tools":[', b'{"type":"function","function":{"name":"f"}}', b"]}"), 400),
    "logit bias": (COMPLETIONS, b'{"prompt":"x","logit_bias":{%b}}' % fields(1_000_000), 400),
    "ids as floats": (COMPLETIONS, repeated(b'{"prompt":[', b"1.0", b"]}"), 400),
    "texts for vectors": ("/v1/embeddings", repeated(b'{"input":[', b'"x"', b"]}"), 400),
    "ids for a text": ("/detokenize", repeated(b'{"tokens":[', b"1", b"]}"), 400),
    "as many ids as are read": ("/detokenize", repeated(b'{"tokens":[', b"97", b"]}", 380_000), 200),
    "token texts": (
        "/tokenize",
        b'{"prompt":"%b","return_token_strs":true}' % (b"a" * 1_000_000),
        200,
    ),
    "not JSON": (COMPLETIONS, b'"' * MOST, 400),
}


@pytest.fixture(scope="module", autouse=True)
def settled() -> Iterator[None]:
    """As `fdcore serve` does it: what the tests have loaded is not visited by the garbage collector."""
    settle()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live() as running:
        yield running


@pytest.mark.parametrize("name", BODIES)
def test_a_body_does_not_stop_the_loop(server: LiveServer, name: str) -> None:
    path, body, status = BODIES[name]
    seen = set()
    pause = stall(server, lambda: seen.add(post(server, path, body)[0]))
    assert seen == {status}
    assert pause < LONGEST_STALL


def test_a_stall_is_noticed(server: LiveServer) -> None:
    def hold() -> None:
        sum(range(20_000_000))

    assert stall(server, lambda: server.call(hold)) > LONGEST_STALL


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_full_of_log_probabilities_does_not_stop_the_loop(path: str, stream: bool) -> None:
    asked = (
        b'"prompt":"x","logprobs":20'
        if path == COMPLETIONS
        else MESSAGE[1:] + b'"x"}],"logprobs":true,"top_logprobs":20'
    )
    body = b'{%b,"n":128,"max_tokens":200,"stream":%b}' % (asked, b"true" if stream else b"false")
    with live(lambda: FakeClient("x" * 200, max_num_seqs=128)) as running:
        answers: list[tuple[int, bytes]] = []
        pause = stall(running, lambda: answers.append(post(running, path, body)))
    assert {status for status, _ in answers} == {200}
    assert len(answers[0][1]) > 5 * MB
    assert pause < LONGEST_STALL
