"""Answer a question about a few documents: find passages by vectors, rank them, and let the model read the best."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from openai import OpenAI

PROMPT = """Answer the question in one sentence, only from these notes. If they do not contain it, say so.

{notes}

Question: {question}"""


def passages(folder: Path) -> list[str]:
    """Return the paragraphs of every document, each after its document's name."""
    return [
        f"{file.stem}: {paragraph.strip()}"
        for file in sorted(folder.glob("*.md"))
        for paragraph in file.read_text().split("\n\n")
    ]


class Index:
    """Passages and their vectors. Made once; a few thousand passages need no database."""

    def __init__(self, client: OpenAI, model: str, texts: Sequence[str]) -> None:
        self.client, self.model, self.texts = client, model, texts
        self.vectors = self._embed(texts)

    def near(self, question: str, count: int) -> list[str]:
        """Return the passages whose vectors are nearest: fast, and coarse."""
        scores = self.vectors @ self._embed([question])[0]
        return [self.texts[number] for number in np.argsort(-scores)[:count]]

    def best(self, question: str, near: Sequence[str], count: int) -> list[str]:
        """Return the best of them, scored together with the question: slower, and better with a model made for it."""
        body = {"model": self.model, "query": question, "documents": near, "top_n": count}
        answer: Any = self.client.post("/rerank", body=body, cast_to=object)
        return [near[each["index"]] for each in answer["results"]]

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        answer = self.client.embeddings.create(model=self.model, input=list(texts))
        return np.array([each.embedding for each in answer.data], np.float32)


def ask(client: OpenAI, model: str, question: str, notes: Sequence[str]) -> str:
    """Return the answer of a model that has read the notes."""
    content = PROMPT.format(notes="\n".join(f"- {note}" for note in notes), question=question)
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=100
    )
    return reply.choices[0].message.content or ""


def main() -> None:
    """Answer the question of the command line, and show what the answer is based on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--documents", type=Path, default=Path(__file__).parent / "documents")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server of the model that answers")
    parser.add_argument("--vectors", help="server of the model that makes vectors; without, the same")
    given = parser.parse_args()
    chat = OpenAI(base_url=f"{given.url}/v1", api_key="none")
    vectors = OpenAI(base_url=f"{given.vectors or given.url}/v1", api_key="none")
    index = Index(vectors, vectors.models.list().data[0].id, passages(given.documents))
    notes = index.best(given.question, index.near(given.question, 5), 3)
    print(ask(chat, chat.models.list().data[0].id, given.question, notes))
    print("\nread:", *notes, sep="\n- ")


if __name__ == "__main__":
    main()
