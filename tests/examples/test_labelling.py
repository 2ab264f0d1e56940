"""Every text is labelled once, by the schema; an interrupted run, or one with more texts, requests the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from fd_core.cli.app import app
from tests.examples.conftest import EXAMPLES

MESSAGES = EXAMPLES / "labelling" / "messages.txt"
ENGINE = ("--model", "null", "--backend", "null", "--engine", "inproc", "--max-num-seqs", "4")


@pytest.fixture
def labelling(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("labelling/label")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The custom ids of each batch, which runs in this process."""
    seen: list[list[str]] = []

    def run(command: list[Any], check: bool) -> subprocess.CompletedProcess[str]:
        words = [str(each) for each in command[3:]]
        seen.append([json.loads(line)["custom_id"] for line in Path(words[2]).read_text().splitlines()])
        return subprocess.CompletedProcess(command, CliRunner().invoke(app, words).exit_code)

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_text_has_labels_that_the_schema_allows(labelling: ModuleType, tmp_path: Path) -> None:
    target = tmp_path / "labels.jsonl"
    script = str(EXAMPLES / "labelling" / "label.py")
    subprocess.run([sys.executable, script, str(MESSAGES), str(target), *ENGINE], check=True, capture_output=True)
    found = lines(target)
    assert [each.pop("text") for each in found] == MESSAGES.read_text().splitlines()
    for each in found:
        jsonschema.validate(each, labelling.SCHEMA)


def test_only_texts_without_labels_are_requested(labelling: ModuleType, runs: list[list[str]], tmp_path: Path) -> None:
    target = tmp_path / "labels.jsonl"
    assert labelling.label(["a", "b", "a"], target, *ENGINE) == 0
    assert labelling.label(["b", "c", "a"], target, *ENGINE) == 0
    assert labelling.label(["b", "c", "a"], target, *ENGINE) == 0
    assert runs == [[labelling.digest("a"), labelling.digest("b")], [labelling.digest("c")]]
    assert [each["text"] for each in lines(target)] == ["a", "b", "c"]


def test_truncated_last_line_is_requested_again(labelling: ModuleType, runs: list[list[str]], tmp_path: Path) -> None:
    target = tmp_path / "labels.jsonl"
    assert labelling.label(["a", "b"], target, *ENGINE) == 0
    target.write_text(target.read_text()[:-5])
    assert labelling.label(["a", "b"], target, *ENGINE) == 0
    assert runs[1] == [labelling.digest("b")]
    assert [each["text"] for each in lines(target)] == ["a", "b"]


def test_unread_answers_are_read_and_not_requested_again(
    labelling: ModuleType, runs: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "labels.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(labelling, "read_labels", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            labelling.label(["a", "b"], target, *ENGINE)
    assert labelling.label(["a", "b"], target, *ENGINE) == 0
    assert len(runs) == 1 and len(lines(target)) == 2


def test_interrupted_run_resumes_with_its_answers(labelling: ModuleType, runs: list[list[str]], tmp_path: Path) -> None:
    target, answers = tmp_path / "labels.jsonl", tmp_path / "labels.answers"
    had = {"mood": "angry", "about": "product"}
    choice = {"finish_reason": "stop", "message": {"content": json.dumps(had)}}
    response = {"status_code": 200, "request_id": "r", "body": {"choices": [choice]}}
    answer = {"id": "batch_req_00000001", "custom_id": labelling.digest("a"), "response": response, "error": None}
    (tmp_path / f"{answers.name}.partial").write_text(json.dumps(answer) + "\n")
    assert labelling.label(["a", "b"], target, *ENGINE) == 0
    assert lines(target)[0] == {"text": "a"} | had and len(lines(target)) == 2


def test_failed_start_returns_its_exit_code_and_writes_no_label(
    labelling: ModuleType, runs: list[list[str]], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        labelling.label(["a"], tmp_path / "labels.jsonl", *ENGINE, "--max-num-seqs", "0")
    assert ended.value.code == 2 and not (tmp_path / "labels.jsonl").exists()


def test_failed_text_has_no_labels_and_is_requested_again(
    labelling: ModuleType, runs: list[list[str]], tmp_path: Path
) -> None:
    target = tmp_path / "labels.jsonl"
    long = "word " * 20_000
    for _ in range(2):
        assert labelling.label(["a", long], target, *ENGINE, "--max-model-len", "2048") == 1
    assert runs[1] == [labelling.digest(long)]
    assert [each["text"] for each in lines(target)] == ["a"]
