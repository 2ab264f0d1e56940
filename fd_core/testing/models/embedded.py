"""Axes of steps that begin with states, to which layers add more, as those of images; each case against numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.contract import KVCache, Ops, StepInput
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.axes.covering import Axis, Case, int_of
from fd_core.testing.axes.parts import Part
from fd_core.testing.kit.target import Target
from fd_core.testing.models.arrays import Values, assert_near
from fd_core.testing.models.checkpoints import abilities_of
from fd_core.testing.models.paged import PagedDriver

_AXES: Final = (
    Axis("model", ("llama", "gemma3", "qwen3-moe")),
    Axis("added", (1, 0, 2, 3), ("StepInput.added",)),
    Axis("states", ("always", "first", "every second"), ("StepInput.states",)),
    Axis("filled", ("some", "all", "none")),
    Axis("chunk", (5, 1, 40)),
    Axis("last_only", (False, True), ("StepInput.logits_rows",)),
)
"""`added`: levels of states that follow those before the first layer; `states`: the steps that have them; `filled`: the
tokens of which added states are not zeros."""
_PROMPTS: Final = (13, 1, 21)
_TOLERANCE: Final = {"float32": 1e-4, "float16": 0.14, "bfloat16": 0.28, "packed": 0.8}
"""Largest error of a logit by `Target.precision`, relative to the largest logit: a token may go to another expert."""


def check_embedded(target: Target, case: Case) -> None:
    """Compare the logits of chunked prompts, of which some steps begin with states. Raises `AssertionError`."""
    path = target.oracle.checkpoint(str(case["model"]))
    assert path is not None
    ours = type(target.backend)(target.config(max_model_len=64)).load_model(path, target.ops, lambda *_: None)
    with open_checkpoint(path) as checkpoint:
        right = load_model(checkpoint, NumpyOps(), 64, quantization=target.quantization)
    found, expected = (_logits(model, ops, case) for model, ops in ((ours, target.ops), (right, NumpyOps())))
    ops = NumpyOps()
    assert_near(ops, ops.from_host(found), expected, _TOLERANCE[target.precision])


def _logits(model: Any, ops: Ops, case: Case) -> Any:
    make = Values(3)
    prompts = [(7 + make(length, scale=60).astype(np.int32)) % model.vocab_size for length in _PROMPTS]
    driver = PagedDriver(
        model, ops, [each.tolist() for each in prompts], longest=64, last_only=case["last_only"] is True
    )
    width, compute = ops.settle(model.embed(_tokens(ops))).shape[1], driver.forward
    driver.forward = _with_states(ops, compute, make, case, width)
    while driver.advance(1, int_of(case, "chunk")):
        pass
    return np.stack([logits for row in driver.rows for logits in row.logits])


def _tokens(ops: Ops) -> Any:
    """Return the part of a step that an embedding reads."""
    zero = ops.from_host(np.zeros(1, np.int32))
    return StepInput(zero, zero, zero, zero, zero, zero, zero, max_query=1, max_context=1)


def _with_states(
    ops: Ops, compute: Callable[[StepInput, KVCache], Any], make: Values, case: Case, width: int
) -> Callable[[StepInput, KVCache], Any]:
    """Return a forward that begins with states in the steps of the case."""
    steps = 0

    def forward(step: StepInput, cache: KVCache) -> Any:
        nonlocal steps
        steps += 1
        count = len(step.token_ids)
        levels = [make(count, width) for _ in range(1 + int_of(case, "added"))]
        for level in levels[1:]:
            level[:: {"some": 3, "all": count + 1, "none": 1}[str(case["filled"])]] = 0
        if {"always": 1, "first": steps == 1, "every second": steps % 2}[str(case["states"])]:
            first, *others = map(ops.states_from_host, levels)
            step = replace(step, states=first, added=tuple(others))
        return compute(step, cache)

    return forward


def _allowed(case: Case) -> bool:
    return bool(case["added"]) or case["filled"] == "some"


def needs_of(case: Case) -> tuple[str, ...]:
    """Return the abilities that a case requires."""
    return ("encoders", *abilities_of(str(case["model"])))


EMBEDDED: Final[Part[Target]] = Part("embedded", _AXES, check_embedded, _allowed)
