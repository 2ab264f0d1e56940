"""Random requests generated from the OpenAPI document: the server never fails and answers as documented.

Hypothesis derives the examples from the test's name, so every run draws the same ones; a failure prints the case and
the request as a curl command.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from schemathesis.generation import GenerationMode

from fd_core.config import ServerConfig
from fd_core.server.app import create_app
from tests.server.fakes import FakeClient, LiveServer, byte_tokenizer, chat_template, live
from tests.server.random_requests import operations, send

DOCUMENT = create_app(ServerConfig(batch_api=False), FakeClient(), byte_tokenizer(), chat_template()).openapi()
OPERATIONS = operations(DOCUMENT)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[LiveServer]:
    """An engine that accepts every id allowed by the document, so that valid requests often succeed."""
    with live(lambda: FakeClient("Hello", vocab_size=2**31, max_num_seqs=256)) as server:
        yield server


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
@pytest.mark.in_turn(2)
def test_random_requests_are_answered_as_documented(
    operation: schemathesis.APIOperation, mode: GenerationMode, fuzzed: LiveServer
) -> None:
    if mode is GenerationMode.NEGATIVE and "requestBody" not in DOCUMENT["paths"][operation.path][operation.method]:
        pytest.skip("no value can be invalid")

    examples = 5 if operation.method == "post" else 2  # tests/hostile/test_fuzz.py sends them for minutes
    send(fuzzed.url, operation, mode, examples=examples, seen=lambda _: alive(fuzzed))


def alive(server: LiveServer) -> None:
    assert server.client.alive


def test_document_lists_every_tested_route() -> None:
    assert {operation.path for operation in OPERATIONS} == set(DOCUMENT["paths"])
