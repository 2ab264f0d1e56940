"""`fdcore train-drafter`, as in docs/serve/speculative-decoding.md, writes a head that drafts what the model writes."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from fd_core.cli.app import assemble
from fd_core.engine.building import head_training as training
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.testing.models.texts import run
from fd_core.text.tokenizer import byte_tokenizer
from tests.models.test_draft_heads import headed, plain
from tests.models.test_draft_model_packs import specs

LENGTH = 72


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Model whose tokens are bytes; a step of a training takes a second."""
    monkeypatch.setattr(training, "load_tokenizer", lambda checkpoint: byte_tokenizer())
    monkeypatch.setattr(training, "_LENGTH", LENGTH)
    seconds = itertools.count()
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    return write_checkpoint("llama", tmp_path / "model", vocab_size=258)


def test_trained_head_drafts_what_the_model_writes(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = specs()
    expected = run(plain(target, "native"), requests).tokens
    whole = [np.array([*spec.prompt, *expected[spec.request_id]], np.int32)[-LENGTH:] for spec in requests]
    opened, _ = training.open_target(target, threads=1)
    trained = training.train_head(
        opened, whole * 3, tmp_path / "head", minutes=60 / 60, vocabulary=150, progress=lambda *_: None
    )
    assert trained.sequences == 59
    first, second, third = trained.acceptance
    assert 0 < third < second < first
    monkeypatch.undo()
    engine = headed(target, tmp_path / "head", "native")
    assert run(engine, requests).tokens == expected
    drafts = engine.stats().scheduler.drafts
    assert drafts.accepted_per_position[0] > drafts.proposed_per_position[0] / 6


def test_command_writes_a_head(target: Path, tmp_path: Path) -> None:
    text, head = tmp_path / "text", tmp_path / "head"
    text.write_text("one two three four five " * 20)
    arguments = [
        "train-drafter",
        str(target),
        str(head),
        "--text",
        str(text),
        "--minutes",
        "0.05",
        "--num-threads",
        "1",
    ]
    first = CliRunner().invoke(assemble("train-drafter"), arguments)
    assert first.exit_code == 0, first.output
    assert "held-out texts accept drafts 1, 2, 3 at" in first.output
    assert {file.name for file in head.iterdir()} == {"config.json", "model.safetensors"}
    again = CliRunner().invoke(assemble("train-drafter"), arguments)
    assert again.exit_code != 0
