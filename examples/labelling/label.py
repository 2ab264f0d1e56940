"""Label texts by a JSON schema, many at once: write a batch, let `fdcore run-batch` answer it, read the labels back."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["pleased", "angry"]},
        "about": {"enum": ["delivery", "product", "support"]},
    },
    "required": ["mood", "about"],
    "additionalProperties": False,
}
INSTRUCTION = (
    "Label the customer's message: is the customer pleased or angry, and what is the message about? Answer in JSON."
)
EXAMPLES = (
    ("They never answer the phone. What a shame!", {"mood": "angry", "about": "support"}),
    ("It arrived a day early, wonderful.", {"mood": "pleased", "about": "delivery"}),
)
"""Small models need examples; the schema enforces only the structure."""


def request(text: str) -> dict[str, Any]:
    """Return the line of the batch that asks for the labels of a text; its id is the digest of the text."""
    messages = [{"role": "system", "content": INSTRUCTION}]
    for example, labels in EXAMPLES:
        messages.append({"role": "user", "content": example})
        messages.append({"role": "assistant", "content": json.dumps(labels)})
    messages.append({"role": "user", "content": text})
    form = {"type": "json_schema", "json_schema": {"name": "labels", "schema": SCHEMA, "strict": True}}
    body = {"messages": messages, "response_format": form, "temperature": 0, "max_tokens": 100}
    return {"custom_id": digest(text), "method": "POST", "url": "/v1/chat/completions", "body": body}


def digest(text: str) -> str:
    """Return a name for a text that is the same in every run."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_labels(answers: Path) -> dict[str, dict[str, str]]:
    """Return labels by digest; a request that failed, or whose answer was cut off, has none."""
    found = {}
    for line in answers.read_text().splitlines():
        answer = json.loads(line)
        if answer["response"] and answer["response"]["status_code"] == 200:
            choice = answer["response"]["body"]["choices"][0]
            if choice["finish_reason"] == "stop":
                found[answer["custom_id"]] = json.loads(choice["message"]["content"])
    return found


def kept(target: Path) -> list[str]:
    """Return digests of the texts that are labelled; a last line that was cut off, as on a full disk, is removed."""
    lines = target.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        target.write_text("".join(lines := lines[:-1]))
    return [digest(json.loads(line)["text"]) for line in lines]


def label(texts: list[str], target: Path, *flags: str) -> int:
    """Append a line to `target` for each text that has none there, and return how many are still without.

    `flags` are those of `fdcore run-batch`. A run that was interrupted goes on where it stopped.
    """
    done = set(kept(target)) if target.exists() else set()
    missing = {digest(text): text for text in texts if digest(text) not in done}
    if not missing:
        return 0
    requests, answers = target.with_suffix(".requests"), target.with_suffix(".answers")
    if not answers.exists():
        requests.write_text("".join(f"{json.dumps(request(text))}\n" for text in missing.values()))
        command = [sys.executable, "-m", "fd_core.cli", "run-batch", "-i", requests, "-o", answers, *flags]
        code = subprocess.run(command, check=False).returncode
        if not answers.exists():
            # It has printed the reason; the answers so far are in a file next to `answers`.
            sys.exit(code)
    labels = read_labels(answers)
    with target.open("a") as file:
        file.writelines(f"{json.dumps({'text': missing[each]} | labels[each])}\n" for each in missing if each in labels)
    answers.unlink()
    return len(missing.keys() - labels.keys())


def main() -> int:
    """Label the lines of a file; arguments after the two files go to `fdcore run-batch`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path)
    parser.add_argument("labels", type=Path)
    given, flags = parser.parse_known_args()
    return bool(label(given.texts.read_text().splitlines(), given.labels, *flags))


if __name__ == "__main__":
    sys.exit(main())
