"""Random requests made from the OpenAPI document: the server never fails and answers as the document says.

Hypothesis derives the examples from the test's name, so every run makes the same ones; a failure prints the case and
the request as a curl command.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import checks
from schemathesis.generation import GenerationMode

from fd_core.config import ServerConfig
from fd_core.server.app import create_app
from tests.server.fakes import FakeClient, LiveServer, byte_tokenizer, chat_template, live

DOCUMENT = create_app(ServerConfig(batch_api=False), FakeClient(), byte_tokenizer(), chat_template()).openapi()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[LiveServer]:
    """An engine that knows every id that the document allows, so that valid requests are often accepted."""
    with live(lambda: FakeClient("Hello", vocab_size=2**31, max_num_seqs=256)) as server:
        yield server


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_random_requests_are_answered_as_documented(
    operation: schemathesis.APIOperation, mode: GenerationMode, fuzzed: LiveServer
) -> None:
    if mode is GenerationMode.NEGATIVE and operation.method in ("get", "delete"):
        pytest.skip("nothing of it can be wrong")

    @settings(
        max_examples=25 if operation.method == "post" else 3,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        response = case.call(base_url=fuzzed.url)
        case.validate_response(response, checks=CHECKS)
        assert fuzzed.client.alive

    check()


def test_the_document_lists_what_the_tests_cover() -> None:
    assert {operation.path for operation in OPERATIONS} == set(DOCUMENT["paths"])
