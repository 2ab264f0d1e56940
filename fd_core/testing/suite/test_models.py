"""Models: each architecture with whole prompts, chunks and mixed decodes, compared with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core.backends.contract import AdaptableModel, Model
from fd_core.errors import ModelError
from fd_core.models.decoder import DecoderModel
from fd_core.models.loading.adapter import read_adapter
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model, spec_of, with_draft_head
from fd_core.ops.contract import KVCache, Ops, StepInput
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.runner.runner import states_of
from fd_core.testing.kit.judging import MARGIN
from fd_core.testing.kit.requirements import lacks, thorough_but
from fd_core.testing.kit.target import Target
from fd_core.testing.models.adapters import merge_adapter, write_adapter
from fd_core.testing.models.arrays import Floats, assert_near, named
from fd_core.testing.models.checkpoints import CASES, SIZES, abilities_of, drawn_ropes, write_checkpoint
from fd_core.testing.models.drafting import write_head
from fd_core.testing.models.paged import PagedDriver, Row

REQUIRES = ("checkpoints",)

LOGITS_ERROR = {"float32": 1e-4, "float16": 2.0, "bfloat16": 4.0, "packed": 12.0}
"""Maximum error of a logit by `Target.precision`; logits have a standard deviation of 4.

Rounding may route a token to another expert.
"""
MEAN_ERROR = {"float32": 2e-5, "float16": 0.01, "bfloat16": 0.05, "packed": 0.15}
"""Maximum mean error relative to that deviation."""

HEADED_ERROR = {"float32": 2e-4, "float16": 0.1, "bfloat16": 0.2, "packed": 0.5}
"""Maximum error of a logit of a model and its draft head, relative to the largest one."""
WAYS = {
    "whole": (None, (1, 23, 8, 11)),
    "chunked": (5, (1, 23, 8, 11)),
    "mixed": (3, (4, 27, 2, 9)),
    "alone": (None, (13,)),
}
GENERATED = 6
DESCRIBED = [name for name, value in vars(Model).items() if isinstance(value, property) and name != "weights"]
"""Properties of a model that all backends load alike."""
EQUAL = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64) | {"num_key_value_heads": 4}
"""Hidden size equal to the width of all heads, to detect buffers that are mixed up by width."""


def prompts(vocab: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


@cache
def oracle_logits(
    folder: Path,
    tokens: tuple[int, ...],
    quantization: str = "auto",
    adapter: Path | None = None,
    kv_dtype: str = "auto",
) -> Floats:
    """Return the oracle's logits of every position of a single sequence."""
    with open_checkpoint(folder) as checkpoint:
        model: Model = load_model(checkpoint, NumpyOps(), 64, quantization=quantization)
    if adapter is not None:
        model = adapted_by(model, folder, [adapter])
    places = None if adapter is None else [1]
    driver = PagedDriver(model, NumpyOps(), [list(tokens)], longest=64, kv_dtype=kv_dtype, places=places)
    driver.step([(0, len(tokens))])
    return np.stack(driver.rows[0].logits)


def written(case: str, checkpoints: Path) -> Path:
    folder = checkpoints / case
    if not (folder / "model.safetensors").exists():
        write_checkpoint(case, folder)
    return folder


def adapted_by(model: Model, folder: Path, adapters: Sequence[Path]) -> Model:
    """Return the model with adapters for the checkpoint in `folder`."""
    assert isinstance(model, AdaptableModel)
    with open_checkpoint(folder) as checkpoint:
        linears = spec_of(checkpoint).adaptable()
    return model.with_adapters([read_adapter(each, linears, 6) for each in adapters])


def loaded(target: Target, ops: Ops, folder: Path) -> Model:
    model: Model = type(target.backend)(target.config(max_model_len=64)).load_model(folder, ops, lambda *_: None)
    return model


def assert_close(
    target: Target, row: Row, expected: Floats, largest: Mapping[str, float] = LOGITS_ERROR, share: float = 1.0
) -> None:
    """Compare the logits of a row; `share` scales the allowed mean error."""
    error = np.abs(np.stack(row.logits) - expected)
    # An element of KV between two steps moves a logit as float16 does, or as bfloat16 if it is FP8.
    steps = {"int8": "float16", "fp8": "bfloat16"}
    key = steps.get(target.kv_dtype, "float32") if target.precision == "float32" else target.precision
    assert np.isfinite(error).all()
    assert error.max() < largest[key]
    assert error.mean() < share * MEAN_ERROR[key] * expected.std()


ADAPTED_ERROR = {**LOGITS_ERROR, "float32": 2e-4}
"""Maximum error of a logit compared with merged weights, which are rounded again."""


@pytest.mark.parametrize("way", thorough_but(WAYS, "whole", "mixed"))
@pytest.mark.parametrize("case", CASES)
def test_a_model_computes_what_the_oracle_computes(
    target: Target, ops: Ops, checkpoints: Path, require: Callable[..., None], case: str, way: str
) -> None:
    require(*abilities_of(case))
    folder = written(case, checkpoints)
    chunk, lengths = WAYS[way]
    model = loaded(target, ops, folder)
    with open_checkpoint(folder) as checkpoint:
        right = load_model(checkpoint, NumpyOps(), 64, quantization=target.quantization)
    for name in DESCRIBED:
        assert getattr(model, name) == getattr(right, name), name
    driver = PagedDriver(model, ops, prompts(model.vocab_size, lengths), longest=64)
    driver.generate(GENERATED, chunk)
    for row in driver.rows:
        expected = oracle_logits(folder, tuple(row.tokens[:-1]), target.quantization)
        assert_close(target, row, expected)
        chosen = expected[row.prompt_len - 1 :]
        lead = chosen.max(axis=1) - chosen[np.arange(GENERATED), row.generated]
        assert lead.max() <= MARGIN[target.precision], "a greedy token is not the oracle's"


def test_ropes_of_every_kind(target: Target, ops: Ops, checkpoints: Path) -> None:
    """Compute layers with ropes of which a backend that loads models itself may have tables of its own."""
    for number, rope in enumerate(drawn_ropes(np.random.default_rng(0), SIZES["head_dim"] // 2)):
        folder = checkpoints / f"rope-{number}"
        try:
            write_checkpoint("llama", folder, num_hidden_layers=1, rope_parameters=rope)
            model = loaded(target, ops, folder)
        except ModelError:  # to refuse is safe
            continue
        driver = PagedDriver(model, ops, prompts(model.vocab_size, (60,)), longest=64)
        driver.step([(0, 60)])
        with named(f"rope_parameters={rope}"):
            assert_close(
                target, driver.rows[0], oracle_logits(folder, tuple(driver.rows[0].tokens), target.quantization)
            )


def test_a_draft_head_reads_what_the_oracle_reads(target: Target, ops: Ops, checkpoints: Path) -> None:
    """Texts do not show wrong drafts, which the model rejects; so compare the logits of a head's drafts."""
    folder = written("llama", checkpoints)
    head, model = write_head(folder, checkpoints / "llama-head"), loaded(target, ops, folder)
    if not isinstance(model, DecoderModel):
        lacks("its models have no draft heads")
    with open_checkpoint(folder) as checkpoint:
        oracle = load_model(checkpoint, NumpyOps(), 64, quantization=target.quantization)
    found, expected = (headed_logits(with_draft_head(each, head), each.ops) for each in (model, oracle))
    for what, one, other in zip(("the model", "the head"), found, expected, strict=True):
        with named(what):
            assert_near(NumpyOps(), one, other, HEADED_ERROR[target.precision])


def headed_logits(model: DecoderModel, ops: Ops) -> tuple[Floats, Floats]:
    """Return the logits of chunked prompts by a model and by its draft head, which reads the states of each step."""
    driver = PagedDriver(model, ops, prompts(model.vocab_size, WAYS["chunked"][1]), longest=64, last_only=True)
    compute, head, drafted = ops.compile_states(states_of(model)), model.draft_head, list[Floats]()
    assert head is not None

    def forward(step: StepInput, cache: KVCache) -> Any:
        states, *taps = compute(step, cache)
        logits = model.head(ops.gather_rows(states, step.logits_rows))
        read = head.forward(replace(step, states=reduce(ops.add, taps)), cache)
        drafted.append(np.array(ops.to_host(head.logits(read))))
        return logits

    driver.forward = forward
    while driver.advance(1, 5):
        pass
    return np.stack([logits for row in driver.rows for logits in row.logits]), np.concatenate(drafted)


def test_models_take_turns_on_one_pack(target: Target, ops: Ops, checkpoints: Path) -> None:
    """Compute logits of the last token of each row, as an engine does, in turns with a model of the same shapes and a
    smaller one, as a draft model is."""
    folder, adapter, twin = (checkpoints / name for name in ("equal", "equal-adapter", "equal-merged"))
    merge_adapter(write_checkpoint("llama", folder, **EQUAL), write_adapter(folder, adapter, seed=1), twin)
    draft = write_checkpoint("llama", checkpoints / "draft", num_hidden_layers=1)
    drivers = []
    for path, states, placed in (
        (folder, False, False),
        (twin, False, False),
        (folder, True, False),
        (draft, False, False),
        (twin, True, False),
        (folder, False, True),
    ):
        model = loaded(target, ops, path)
        if placed:
            model = adapted_by(model, path, [adapter])
        texts, places = prompts(model.vocab_size, (1, 23, 8)), [1, 1, 1] if placed else None
        driver = PagedDriver(model, ops, texts, longest=64, places=places, last_only=True, states=states)
        drivers.append((driver, path, adapter if placed else None))
    for _ in range(GENERATED):
        for driver, _, _ in drivers:
            driver.advance(GENERATED)
    for driver, path, added in drivers:
        assert [len(row.generated) for row in driver.rows] == [GENERATED] * 3
        for row in driver.rows:
            expected = oracle_logits(path, tuple(row.tokens[:-1]), target.quantization, added)[row.prompt_len - 1 :]
            assert_close(target, row, expected)
