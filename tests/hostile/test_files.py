"""Damaged or forged model files load or fail with our own error, quickly and with little memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core.errors import BadRequest, FdError
from fd_core.models.loading.vector_settings import read_vector_settings
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.models.checkpoints import CASES
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.tokenizer import load_tokenizer
from tests.hostile.limits import MEGABYTE, at_length, tried
from tests.hostile.model_files import gguf_file, model_folder, whole_folder
from tests.models.loading.tiny_gguf import LLAMA, write_gguf

SEEDS = at_length(35, 2000)
SLACK = 48 * MEGABYTE
TABLES = 80 * MEGABYTE
"""Additional bytes for a valid file: tables of 2^20 positions, the largest that seeds request."""
FACTOR = 16
"""Bytes of memory per byte of the file, in addition to the slack."""


def opened(seed: list[Any]) -> dict[str, Any]:
    """Make the file of a seed and load it as at startup. Runs in the child."""
    kind, number = seed
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "forged"
        if kind == "gguf":
            path = path.with_suffix(".gguf")
            path.write_bytes(gguf_file(number))
        else:
            path.mkdir()
            model_folder(number, path)
        files = [path] if path.is_file() else list(path.iterdir())
        size = sum(each.stat().st_size for each in files)
        try:
            _start(path)
        except FdError as error:
            return {"size": size, "error": str(error), "field": error.field, "exit": error.exit_code}
        return {"size": size, "error": None}


def _start(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        with suppress(BadRequest):  # an unusual tokenizer may reject a text
            tokenizer.decode(tokenizer.encode("Hello, 12 worlds! \u6771\u4eac"))
        _ = tokenizer.byte_table, checkpoint.digest
        ChatTemplate.of(tokenizer)
        load_model(checkpoint, NumpyOps())
        read_vector_settings(path, 64)


@pytest.mark.timeout(at_length(700, 2500))
@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_forged_files_fail_with_an_error_naming_file_and_field(
    kind: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("inputs", SEEDS)
    seeds = [[kind, number] for number in range(SEEDS)]
    outcomes = tried(f"{__name__}:opened", seeds, memory=1 << 30, seconds=at_length(600, 2400))
    ends: Counter[str] = Counter()
    for (_, number), outcome in zip(seeds, outcomes, strict=True):
        assert not outcome.error, (kind, number, outcome.error, outcome.message[:500])
        loaded = outcome.result
        assert outcome.seconds < 10, (kind, number, outcome.seconds)
        allowed = SLACK + FACTOR * loaded["size"] + (TABLES if loaded["error"] is None else 0)
        assert outcome.held < allowed, (kind, number, outcome.held, loaded)
        ends["whole" if loaded["error"] is None else "refused"] += 1
        if loaded["error"] is not None:
            assert "forged" in loaded["error"] or "chat template" in loaded["error"], (kind, number, loaded)
            assert loaded["field"] and loaded["exit"] == 3, (kind, number, loaded)
            assert len(loaded["error"]) < 2000, (kind, number, len(loaded["error"]))
    print(ends)
    assert ends["refused"] > SEEDS // 2 and ends["whole"] > SEEDS // 100


def gguf_with(path: Path, architecture: str, extra: dict[str, Any], *dropped: str) -> Path:
    values = {**LLAMA, "attention.sliding_window": 8, "expert_count": 2, "expert_used_count": 1}
    values |= {"expert_feed_forward_length": 64}
    values = {name: value for name, value in values.items() if architecture != "llama" or "expert" not in name}
    values |= {name: value for name, value in extra.items() if "." not in name or name.split(".")[0] != "tokenizer"}
    rest = {name: value for name, value in extra.items() if name.startswith("tokenizer.")}
    tensors = {"token_embd.weight": np.zeros((48, 32), "f4")} if dropped else None
    return write_gguf(path, arch=architecture, values=values, tensors=tensors, extra=rest)


def folder_with(path: Path, case: str, name: str, changes: dict[str, Any]) -> Path:
    path.mkdir()
    for file, content in whole_folder(case).items():
        given = json.loads(content) | changes if file == name else None
        (path / file).write_bytes(content if given is None else json.dumps(given).encode())
    return path


def started(given: list[Any]) -> None:
    """Load a file with one deliberate fault. Runs in the child."""
    kind, what, *more = given
    with tempfile.TemporaryDirectory() as made:
        path = Path(made)
        if kind == "gguf":
            path = gguf_with(path / "forged.gguf", what, *more)
        elif kind == "folder":
            path = folder_with(path / "forged", what, *more)
        elif kind == "scores":
            tokens = [*dict.fromkeys(_SCORED[what](), 0)]
            listed = {"tokens": tokens, "scores": [0.0] * len(tokens), "token_type": [1] * len(tokens)}
            extra = {f"tokenizer.ggml.{name}": value for name, value in {**listed, "model": "llama"}.items()}
            path = gguf_with(path / "forged.gguf", "llama", extra)
        _start(path)


_SCORED: dict[str, Callable[[], list[str]]] = {
    "a long token": lambda: ["a", "b" * 2_000_000, "ab"],
    "tokens of tokens": lambda: ["a" * length for length in range(1, 1000)],
    "long tokens": lambda: [f"{number:04}" * 200 for number in range(5000)],
}
_WORD = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1]}
AIMED: list[list[Any]] = [
    *(
        ["gguf", architecture, {"block_count": count}, "tensors"]
        for architecture in ("llama", "gemma3", "qwen3moe", "ernie4_5-moe")
        for count in (2**32 - 1, 2**31 - 1, 1_000_000)
    ),
    *(["gguf", "qwen3moe", {**_WORD, "expert_count": count}] for count in (2**31 - 1, 1_000_000)),
    ["gguf", "llama", {**_WORD, "context_length": 2**31 - 1}],
    ["gguf", "llama", {**_WORD, "attention.key_length": 2**31 - 2, "rope.dimension_count": 2**31 - 2}],
    *(["scores", name] for name in _SCORED),
    *(["folder", case, "config.json", {"num_hidden_layers": 2**31 - 1}] for case in CASES),
    *(["folder", case, "config.json", {"num_hidden_layers": 2000}] for case in ("llama", "qwen3-moe", "gemma3")),
    ["folder", "qwen3-moe", "config.json", {"num_experts": 2**31 - 1}],
    ["folder", "qwen3-moe", "config.json", {"num_hidden_layers": 1000, "num_experts": 1000, "layer_types": None}],
    ["folder", "ernie-moe", "config.json", {"moe_num_experts": 2**31 - 1}],
    ["folder", "llama", "config.json", {"head_dim": 2**31 - 2}],
    ["folder", "llama", "config.json", {"max_position_embeddings": 2**31 - 1}],
    ["folder", "llama", "config.json", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 1e-320}}],
    ["folder", "llama", "config.json", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1.0}}],
    ["folder", "llama", "config.json", {"partial_rotary_factor": 1e308}],
    ["folder", "llama", "tokenizer.json", {"decoder": [3]}],
    ["folder", "llama", "tokenizer.json", {"added_tokens": [{"id": 2**32 - 1, "content": "z", "special": True}]}],
    ["folder", "llama", "tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 0, "b": 2**31}, "merges": []}}],
    [
        "folder",
        "llama",
        "tokenizer.json",
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
    ],
    ["folder", "llama", "tokenizer_config.json", {"chat_template": [{"name": [1], "template": 3}]}],
    [
        "folder",
        "llama",
        "tokenizer_config.json",
        {"chat_template": "{% for i in range(99999) %}{{ 'a' * i }}{% endfor %}"},
    ],
]


def test_files_with_false_sizes_are_rejected_before_allocation(
    record_property: Callable[[str, object], None],
) -> None:
    record_property("inputs", len(AIMED))
    outcomes = tried(f"{__name__}:started", AIMED, memory=1 << 30, seconds=at_length(300, 900))
    for given, outcome in zip(AIMED, outcomes, strict=True):
        fine = given in (["scores", "long tokens"], AIMED[-2])  # unusual but valid
        assert outcome.error == ("" if fine else "ModelError"), (given, outcome)
        assert outcome.held < (700 if "{%" in str(given) else 64) * MEGABYTE, (given, outcome.held / MEGABYTE)
        assert outcome.seconds < 8, (given, outcome.seconds)


def test_slow_tokenizer_regex_is_an_error_of_the_text(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(b+)+$"}, "behavior": "Isolated", "invert": False}
    path = folder_with(tmp_path / "m", "llama", "tokenizer.json", {"pre_tokenizer": split})
    tokenizer = load_tokenizer(open_checkpoint(path))
    assert tokenizer.encode("c")
    with pytest.raises(BadRequest, match="failed on this text"):
        tokenizer.encode("b" * 40 + "!")  # "a" is the BOS token


def test_same_seed_makes_the_same_file() -> None:
    assert gguf_file(7) == gguf_file(7)


@pytest.mark.parametrize("number", range(at_length(2, 12)))
@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_cli_exits_with_code_3_and_one_line(kind: str, number: int, tmp_path: Path) -> None:
    seed, path = number * 1000, tmp_path / "forged"
    while opened([kind, seed])["error"] is None:
        seed += 1
    if kind == "gguf":
        path = path.with_suffix(".gguf")
        path.write_bytes(gguf_file(seed))
    else:
        path.mkdir()
        model_folder(seed, path)
    command = [sys.executable, "-m", "fd_core.cli", "complete", "--model", str(path), "--backend", "reference"]
    ended = subprocess.run([*command, "x"], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 3, ended.stderr
    assert ended.stderr.startswith("fdcore: ") and "Traceback" not in ended.stderr, ended.stderr
