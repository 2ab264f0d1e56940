"""Long contexts and a large vocabulary through the engine, compared with the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fd_core.testing.kit.judging import Judge
from fd_core.testing.kit.target import Target
from fd_core.testing.models.checkpoints import LONG_CASE, WIDE_CASE
from fd_core.testing.models.texts import greedy, run
from fd_core.types import RequestSpec, SamplingParams

LONG: dict[str, Any] = {
    "max_num_seqs": 4,
    "num_kv_blocks": 5000 * 3 // 32 + 8,
    "block_size": 32,
    "max_model_len": 5000,
    "max_num_batched_tokens": 601,
    "watchdog_seconds": 60.0,
}
WIDE: dict[str, Any] = {
    "max_num_seqs": 41,
    "num_kv_blocks": 41 * 4,
    "block_size": 16,
    "max_model_len": 64,
    "max_num_batched_tokens": 1024,
    "watchdog_seconds": 60.0,
}


def test_contexts_beyond_any_split_up_to_the_last_position(target: Target) -> None:
    """Run prompts of 2,000 tokens and more in chunks of 601, then decodes, one up to the model's last position."""
    rng = np.random.default_rng(8)
    lengths = {"a": (2048, 4), "b": (2047, 6), "c": (4096 - 3, 7), "d": (5000 - 9, 9)}
    specs = [greedy(name, rng.integers(0, 250, count).tolist(), most) for name, (count, most) in lengths.items()]
    judge = Judge.of(target, "contexts", LONG_CASE, specs, **LONG)
    with target.engine(case=LONG_CASE, **LONG) as engine:
        texts = run(engine, specs).tokens
    judge.check(texts)
    assert {name: len(text) for name, text in texts.items()} == {name: most for name, (_, most) in lengths.items()}


def test_a_vocabulary_beyond_2_17_with_everything_at_once(target: Target, require: Callable[..., None]) -> None:
    """Run 41 requests with log-probabilities, filters, penalties and biases over 140,003 tokens, most beyond 2^16."""
    require("checkpoints")
    specs = wide_specs(target.exact)
    judge = Judge.of(target, "wide", WIDE_CASE, specs, **WIDE)
    with target.engine(case=WIDE_CASE, **WIDE) as engine:
        texts = run(engine, specs)
    judge.check(texts.tokens)
    assert max(token for text in texts.tokens.values() for token in text) > 2**17
    for name, spec in judge.specs.items():
        if spec.params.logprobs is None:
            continue
        for at, score in enumerate(texts.scores[name]):
            if texts.tokens[name][: at + 1] != judge.texts[name][: at + 1]:
                break
            judge.check_scores(name, at, score.logprob, top_ids=score.top_ids, top=score.top)


def wide_specs(exact: bool) -> list[RequestSpec]:
    """Return requests over the large vocabulary; only greedy ones unless `exact`."""
    rng = np.random.default_rng(9)
    specs = []
    for index in range(41):
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
        params["logprobs"] = [None, 0, 1, 20][index % 4]
        if exact and index % 5:
            params |= {
                "temperature": [0.7, 1.0, 2.0][index % 3],
                "top_k": [0, 1, 50, 17_000, 140_003][index % 5],
                "top_p": [1.0, 0.9, 0.999][index % 3],
                "min_p": [0.0, 0.0, 1e-4][index % 3],
                "seed": int(rng.integers(0, 2**63)),
            }
        if index % 3 == 0:
            params |= {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.1}
        if index % 4 == 1:
            high = rng.integers(2**17, 140_003, 30).tolist()
            params["logit_bias"] = dict.fromkeys([*high, 140002, 0], 9.0) | {7: -100.0}
        prompt = tuple(rng.integers(2**16, 140_003, 1 + index % 23).tolist())
        specs.append(RequestSpec(request_id=f"r{index}", prompt=prompt, params=SamplingParams(**params)))
    return specs
