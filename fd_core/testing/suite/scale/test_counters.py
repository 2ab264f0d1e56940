"""Counters: more steps and positions than 16 bits count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np
import pytest

from fd_core.ops.contract import Array, Forward, Heads, KVCache, KVShape, Norm, Rope, StepInput
from fd_core.testing.hooks.purity import count_from, counts_of
from fd_core.testing.kit.target import Target
from fd_core.testing.models.arrays import TOLERANCE, assert_near, on_device, raw, step_input
from fd_core.testing.models.layers import NOWHERE
from fd_core.testing.models.texts import greedy, run

COUNTED: Final = (2**8, 2**15, 2**16, 2**24, 2**31, 2**32, 2**53, 2**63)
BLOCK: Final = 128
CONTEXTS: Final = (9, *(2**power + 1 for power in range(7, 18)), 130)


def test_texts_are_right_at_any_number_of_steps(target: Target) -> None:
    """Move what counts steps or launches, in the pack or the cache, to where 16 to 64 bits and float32 end."""
    more: list[dict[str, Any]] = [{}, {"presence_penalty": 0.5}, {"temperature": 0.7, "seed": 3}]
    specs = [greedy(f"r{at}", range(at, 9 + 3 * at), 8, logprobs=1, **params) for at, params in enumerate(more)]
    with target.engine(num_kv_blocks=64, enable_prefix_caching=False) as engine:
        runner = engine.probe().runner
        kept = runner.ops, runner.cache

        def numbers() -> list[dict[str, float]]:
            run(engine, specs)
            return [{path: value for path, (*_, value) in counts_of(each).items()} for each in kept]

        right, readings = run(engine, specs), [numbers() for _ in range(3)]
        for number, ahead in product(COUNTED, (0, 5)):  # in a step of prompts, and in one of decodes
            for thing, first, second, third in zip(kept, *readings, strict=True):
                steady = {path for path in first.keys() & second.keys() & third.keys() if first[path] < second[path]}
                counts = {path: first[path] for path in steady}
                counts = {path: at for path, at in counts.items() if third[path] + at == 2 * second[path]}
                count_from(thing, counts, number - ahead)
            found = run(engine, specs)
            assert (found.tokens, found.scores) == (right.tokens, right.scores), (
                f"after about {number:,} steps, texts or log-probabilities are others"
            )


@pytest.mark.parametrize("compiled", ["compile", "compile_states"])
def test_compiled_decode_reads_its_whole_context(target: Target, require: Callable[..., None], compiled: str) -> None:
    """Attend over values of -1, then as many of 2, and the last token, which has the weight of 8,103 others."""
    require("primitives", "kv_transfer")
    ops, d = type(target.backend)(target.config()).make_ops(), 16
    # The score of a token with itself is 9; that with the others, whose keys are 0, is 0.
    one, width = np.eye(d, dtype=np.float32), -(-max(CONTEXTS) // BLOCK)
    rope = Rope(*(ops.prepare_vector(np.full((max(CONTEXTS), d // 2), each, np.float32)) for each in (1, 0)))
    heads = Heads(1, 1, d, d**-0.5, rope)
    qkv, table = ops.prepare_linear([raw(6 * one)] * 2 + [raw(one)]), ops.prepare_embedding(raw(one))
    cache = ops.allocate_kv(KVShape(num_layers=1, num_kv_heads=1, head_dim=d, block_size=BLOCK), 3)
    norm, head = Norm(ops.prepare_vector(np.ones(d, np.float32)), 1e-5), ops.prepare_linear([raw(one)])

    def states(step: StepInput, kept: KVCache) -> Array:
        x, layer = ops.embedding(table, step.token_ids), kept.layer(0)
        q = ops.attention_inputs(x, None, qkv, heads, layer, step)
        return ops.project_residual(ops.attention(q, heads, layer, step), head, x)

    def forward(step: StepInput, kept: KVCache, states: Forward = states) -> Array:
        return ops.logits(states(step, kept), norm, head, step.logits_rows)

    replay = ops.compile(forward) if compiled == "compile" else partial(forward, states=ops.compile_states(states))
    history = cache.export_blocks(np.arange(3, dtype=np.int32))
    halves = np.zeros(history.shape, np.float32)
    halves[0, :, 1], halves[1:, :, 1] = -1.0, 2.0
    bits = (halves.view(np.uint32) >> 16).astype(np.uint16) if history.dtype == np.uint16 else halves
    inside = [each for each in CONTEXTS if not target.cls.envelope.exceeded({"max_model_len": each})]
    for number, context in enumerate(inside):
        blocks = -(-context // BLOCK)
        tables = np.where(np.arange(width) < blocks // 2, 0, 1)
        tables[blocks - 1], tables[blocks:] = 2, NOWHERE
        cache.import_blocks(np.arange(3, dtype=np.int32), bits.astype(history.dtype))
        step = step_input([(1, context)], BLOCK, tables[None].astype(np.int32))
        step = on_device(ops, replace(step, token_ids=np.array([number % d], np.int32), uniform=True))
        values = np.repeat(np.where(tables[:blocks] == 0, -1.0, 2.0), BLOCK)[: context - 1].sum()
        expected = one[number % d] + (np.exp(9.0) * one[number % d] + values) / (np.exp(9.0) + context - 1)
        expected /= np.sqrt(np.square(expected).mean() + norm.eps)
        assert_near(ops, replay(step, cache), expected[None].astype(np.float32), max(1e-3, TOLERANCE[ops.dtype]))
