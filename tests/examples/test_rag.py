"""Passages are found by embeddings and ranked, and the model reads the best; word counts are the embeddings here."""

from __future__ import annotations

import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType

import msgspec
import openai
import pytest

from fd_core.types import Delta, RequestSpec
from tests.examples.conftest import EXAMPLES
from tests.server.fakes import FakeClient, LiveServer, live

SIZE = 128
DOCUMENTS = EXAMPLES / "rag" / "documents"


class Words(FakeClient):
    """A vector counts the longer words of its text; a chat answers with the end of its prompt."""

    def _step(self, spec: RequestSpec, done: int) -> Delta:
        delta = super()._step(spec, done)
        if delta.pooled is None:
            return delta
        counts = [0.0] * SIZE
        for word in re.findall(r"\w{4,}", bytes(spec.prompt).decode().lower()):
            counts[zlib.crc32(word.encode()) % SIZE] += 1
        return msgspec.structs.replace(delta, pooled=struct.pack(f"<{SIZE}f", *counts))


def words() -> FakeClient:
    client = Words(max_model_len=4000, state_size=SIZE)
    client.reply = lambda spec: bytes(spec.prompt)[-90:]
    client.per_step = 100
    return client


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live(words) as made:
        yield made


@pytest.fixture
def rag(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("rag/rag")


def test_every_paragraph_is_a_passage_with_its_documents_name(rag: ModuleType) -> None:
    found = rag.passages(DOCUMENTS)
    assert len(found) == 8 and all(re.match(r"(bakery|harbour|library): [A-Z].*\.$", each) for each in found)


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ("When does the ferry to Gull Island leave?", "ferry"),
        ("On which days is there rye bread at the bakery?", "rye bread"),
        ("How many seats has the reading room?", "sixty seats"),
    ],
)
def test_nearest_passage_is_found_and_ranked_first(
    rag: ModuleType, server: LiveServer, question: str, wanted: str
) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        index = rag.Index(client, "fake", rag.passages(DOCUMENTS))
        near = index.near(question, 4)
        assert len(near) == 4 and wanted in near[0]
        # The order of the documents does not matter: the server scores each with the question.
        best = index.best(question, near[::-1], 2)
    assert len(best) == 2 and best[0] == near[0]


def test_program_lets_the_model_read_the_best_passages(
    rag: ModuleType, server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rag, "ask", lambda *given: asked.extend(given) or "It leaves at half past eight.")
    asked: list[object] = []
    monkeypatch.setattr(
        sys, "argv", ["rag", "When does the ferry to Gull Island leave?", "--url", "http://a", "--vectors", server.url]
    )
    monkeypatch.setattr(
        rag,
        "OpenAI",
        lambda base_url, api_key: openai.OpenAI(base_url=base_url.replace("http://a", server.url), api_key=api_key),
    )
    rag.main()
    answer, _, read = capsys.readouterr().out.partition("\n\nread:\n")
    assert answer == "It leaves at half past eight."
    assert read.count("- ") == 3 and read.startswith("- harbour: The ferry")


def test_prompt_has_the_notes_and_the_question(rag: ModuleType, server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        answer = rag.ask(client, "fake", "Who?", ["one: Alice.", "two: Bob."])
    assert answer.endswith("- one: Alice.\n- two: Bob.\n\nQuestion: Who?\nassistant: ")
