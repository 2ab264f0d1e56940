"""Random legal plans beside the oracle, hundreds of them; a failure names its seed, which is the test's parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fd_core.testing.kit.judging import Judge
from fd_core.testing.kit.target import Target
from fd_core.testing.models.checkpoints import LONG_CASE
from fd_core.testing.stepping.plans import RandomPlans
from fd_core.types import RequestSpec, SamplingParams

ROOM: dict[str, Any] = {
    "max_num_seqs": 48,
    "num_kv_blocks": 640,
    "block_size": 16,
    "max_model_len": 2176,
    "max_num_batched_tokens": 701,
}
BLOCK_SIZES = [16, 32, 5, 128, 1, 64]
"""By seed."""
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 47, 64, 65, 100, 127, 128, 129, 255, 257, 300, 640, 641, 2049, 2100]
PREFIX = [(11 * place) % 241 for place in range(80)]


def requests(exact: bool) -> list[RequestSpec]:
    """Prompts of every length, a third of them beginning alike; where `exact`, most are drawn, filtered, penalized."""
    rng = np.random.default_rng(5)
    found = []
    for index in range(60):
        length = LENGTHS[index] if index < len(LENGTHS) else int(rng.integers(1, 120))
        prompt = rng.integers(0, 250, length).tolist()
        if index % 3 == 0:
            prompt[: len(PREFIX)] = PREFIX[: len(prompt)]
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": int(rng.integers(2, 28)), "ignore_eos": True}
        if exact and index % 4:
            params |= {
                "temperature": float(rng.choice([0.5, 1.0, 1.7])),
                "top_k": int(rng.choice([0, 1, 40, 5000])),
                "top_p": float(rng.choice([0.3, 0.95, 1.0])),
                "min_p": float(rng.choice([0.0, 0.05])),
                "seed": int(rng.integers(0, 2**63)),
            }
        if index % 5 == 1:
            params |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.2}
        if index % 7 == 2:
            params |= {"logit_bias": {int(token): 4.0 for token in rng.integers(0, 256, 5)}}
        if index % 3 == 1:
            params |= {"logprobs": int(rng.choice([0, 1, 5, 20]))}
        found.append(RequestSpec(request_id=f"r{index}", prompt=tuple(prompt), params=SamplingParams(**params)))
    return found


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize("seed", range(6))
def test_random_plans_deliver_the_right_texts(target: Target, seed: int, k: int) -> None:
    specs, size = requests(target.exact), BLOCK_SIZES[seed]
    room = ROOM | {"max_num_seqs": len(specs), "num_kv_blocks": 900}
    judge = Judge.of(target, "plans", LONG_CASE, specs, **room)
    blocks = {"block_size": size, "num_kv_blocks": 10_240 // size + 50}
    with target.engine(k, judge.whole(), 0.3, case=LONG_CASE, **ROOM | blocks) as engine:
        plans = RandomPlans(engine, judge, seed)
        plans.run(60)
    for what in ("rows of 40 and more", "tokens of 600 and more", "revocations", "ended", "trickle"):
        assert plans.seen[what], f"no plan had {what}"
    assert (plans.seen["shared blocks"] > 0) == (size < len(PREFIX))
    assert (plans.seen["accepted"] > 0) == (k > 0)
