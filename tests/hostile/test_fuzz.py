"""Random requests to every endpoint of servers and a router: no failure and no undocumented status.

`nox -s hostile` spends ten minutes on each. FD_FUZZ_SECONDS sets the time, FD_FUZZ_SEED the first seed. A failure
prints its seed and the request.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import pytest
from schemathesis.generation import GenerationMode

from tests.hostile.fuzzing import KINDS, Fuzzed, damaged, fuzz, fuzzed, send_damaged
from tests.hostile.limits import LONG, at_length

SEED = int(os.environ.get("FD_FUZZ_SEED", "20261122"))
SECONDS = float(os.environ.get("FD_FUZZ_SECONDS", "600")) if LONG else 0.0
EXAMPLES = at_length(1, 40)
DAMAGED = at_length(100, 20_000)

_TURN = {"role": "user", "content": "hi"}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
_USUAL = {"model": "fake", "max_tokens": 4, "temperature": 0.5, "seed": 1, "stream": False, "n": 1}
BODIES = {
    "/v1/completions": {**_USUAL, "prompt": ["hi", "ho"], "logprobs": 2, "stop": ["a"], "logit_bias": {"5": 1.0}},
    "/v1/chat/completions": {
        **_USUAL,
        "messages": [{"role": "system", "content": [{"type": "text", "text": "be"}]}, _TURN],
        "tools": [_TOOL],
        "chat_template": "{% for m in messages %}{{ m.content|upper }}{% endfor %}",
        "stream_options": {"include_usage": True},
    },
    "/v1/messages": {"model": "fake", "max_tokens": 4, "system": "be", "messages": [_TURN], "stop_sequences": ["a"]},
    "/v1/messages/count_tokens": {"model": "fake", "messages": [_TURN]},
    "/v1/responses": {"model": "fake", "input": [_TURN], "max_output_tokens": 4, "store": True, "metadata": {"a": "b"}},
    "/v1/responses/input_tokens": {"model": "fake", "input": [_TURN], "instructions": "be"},
    "/v1/embeddings": {"model": "fake", "input": ["a", "b"], "encoding_format": "base64"},
    "/tokenize": {"model": "fake", "messages": [_TURN], "return_token_strs": True},
    "/detokenize": {"model": "fake", "tokens": [1, 2, 3]},
    "/v1/abort_requests": {"request_ids": ["a"]},
}


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    with fuzzed(request.param, tmp_path_factory.mktemp("fuzz")) as found:
        yield found
    print(f"{request.param}: {found.tried} requests, answers {dict(sorted(found.answers.items()))}")


def record(target: Fuzzed, record_property: Callable[[str, object], None], before: int) -> None:
    """Record each request as one input."""
    record_property("kind", f"random requests, {target.kind}")
    record_property("inputs", target.tried - before)


@pytest.mark.timeout(300 + 3 * SECONDS)
def test_random_requests_are_answered_as_documented(
    target: Fuzzed, record_property: Callable[[str, object], None]
) -> None:
    before = target.tried
    pairs = [
        (operation, mode)
        for operation in target.operations
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or operation.body  # an invalid request needs a body
    ]
    posts = sum(operation.method == "post" for operation, _ in pairs)
    for operation, mode in pairs:
        post = operation.method == "post"
        fuzz(target, operation, mode, SEED, examples=EXAMPLES, seconds=SECONDS / posts if post else 0.0)
    assert target.tried - before >= len(pairs)
    record(target, record_property, before)


@pytest.mark.timeout(300 + 3 * SECONDS)
def test_damaged_bodies_are_answered_and_never_fail(
    target: Fuzzed, record_property: Callable[[str, object], None]
) -> None:
    rng, before = random.Random(SEED), target.tried
    for _ in range(DAMAGED):
        path = rng.choice(list(BODIES))
        body = damaged(BODIES[path], rng)
        assert send_damaged(target, path, body) < 500, (path, body)
    record(target, record_property, before)
