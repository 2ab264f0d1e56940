"""Budget: the step token budget, protocol 2, counted at the input of the forward pass. Mandatory for every backend."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from fd_core.ops.contract import Array, KVCache, StepInput
from fd_core.testing.kit.judging import Golden
from fd_core.testing.kit.target import Target
from fd_core.testing.models.stepper import Stepper
from fd_core.testing.models.texts import greedy
from fd_core.types import RequestSpec

KS = [0, 3]
PROMPTS: list[list[int]] = np.random.default_rng(1).integers(0, 90, (8, 16)).tolist()


def most_computed(
    golden: Golden, specs: list[RequestSpec], budget: int, k: int, wrong: float, *, eager: bool = False, **room: Any
) -> int:
    """Run requests, check their texts and return the maximum tokens of a step, at most the budget.

    Counts the input of the model's forward, inside any wrapper that a pack compiles. A pack that records the forward
    calls it with arrays of unknown size, which are not counted.
    """
    counts: list[int] = []
    cls = golden.target.cls
    load = cls.load_model

    def load_model(self: Any, *arguments: Any) -> Any:
        model: Any = load(self, *arguments)
        forward = model.forward

        def counting(step: StepInput, cache: KVCache) -> Array:
            shape: Any = getattr(step.token_ids, "shape", ())
            if len(shape) == 1 and isinstance(shape[0], int):
                counts.append(shape[0])
            return forward(step, cache)

        model.forward = counting
        return model

    whole = golden.whole(specs) if k else ()
    engine = golden.target.engine(k, whole, wrong, max_num_batched_tokens=budget, **room)
    with mock.patch.object(cls, "load_model", load_model), engine as loaded:
        counts.clear()  # computed by the warm-up
        stepper = Stepper(loaded, eager=eager)
        stepper.submit(*specs)
        stepper.run(2)
    assert max(counts, default=0) <= budget, "the model computes more tokens than the budget allows"
    golden.check(specs, stepper.texts.tokens)
    return max(stepper.computed)


@pytest.mark.parametrize("k", KS)
@pytest.mark.law("2.1")
def test_a_budget_equal_to_the_demand_serves_every_decode(golden: Golden, k: int) -> None:
    specs = [greedy(f"r{index}", PROMPTS[index][: 1 + k], 20) for index in range(3)]
    assert most_computed(golden, specs, 3 * (1 + k), k=k, wrong=0.0, num_kv_blocks=64) <= 3 * (1 + k)


@pytest.mark.parametrize("k", KS)
@pytest.mark.law("2.4")
def test_the_smallest_legal_budget_brings_everybody_to_the_end(golden: Golden, k: int) -> None:
    specs = [greedy(f"r{index}", PROMPTS[index][:8], 12) for index in range(3)]
    assert most_computed(golden, specs, 1 + k, k=k, wrong=0.3, eager=True) == 1 + k


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("k", KS)
@pytest.mark.law("2")
def test_padding_never_exceeds_the_budget(target: Target, k: int, rows: int) -> None:
    with target.engine(k, max_num_batched_tokens=4) as engine:
        for width in range(1, 5):
            shape = engine.probe().runner.ops.padded(rows, width)
            if shape is not None:
                assert rows <= shape[0] and width <= shape[1] and shape[0] * shape[1] <= 4
