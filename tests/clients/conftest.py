"""Real clients, each in a separate environment: `nox -s clients`. They are not part of the default run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.parsing.thinking import QwenReasoning
from fd_core.types import RequestSpec
from tests.server.fakes import FakeClient, LiveServer, live
from tests.server.processes import serving

CLIENT = os.environ.get("FD_CLIENT", "")
"""The client that this environment has: the stem of its file without `test_`."""
collect_ignore = [each.name for each in Path(__file__).parent.glob("test_*.py") if each.stem != f"test_{CLIENT}"]

ADA = '{"name": "Ada", "age": 36}'


def script(spec: RequestSpec) -> bytes:
    """Think, call the offered tool, then repeat its result; fill the schema if the request has one."""
    prompt = bytes(spec.prompt).decode()
    if "<tool_response>" in prompt:
        reply = "It is sunny in Röm."
    elif "# Tools" in prompt:
        name, arguments = ("weather", '{"city": "Röm"}') if '"weather"' in prompt else (_first_tool(prompt), ADA)
        reply = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    else:
        reply = ADA if spec.params.grammar is not None else "Hello!"
    return f"<think>\nHm.\n</think>\n\n{reply}".encode()


def _first_tool(prompt: str) -> str:
    return prompt.partition('{"type": "function", "function": {"name": "')[2].partition('"')[0]


def fake() -> FakeClient:
    client = FakeClient(max_model_len=60_000)
    client.reply = script
    client.per_step = 4
    return client


@pytest.fixture(scope="session")
def scripted() -> Iterator[LiveServer]:
    """A server whose model follows the script."""
    parsers = Parsers(HermesTools, QwenReasoning)
    with live(fake, parsers=parsers, served_model_names=("scripted", "gpt-5"), response_store=100) as server:
        yield server


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the real model."""
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(log, "smollm2", "--max-num-seqs", "4", "--max-model-len", "2048", "--dtype", "float32") as server:
        yield server.url
