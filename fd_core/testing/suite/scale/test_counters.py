"""Counters: more steps, launches and positions than 16 bits count, on models that take almost no time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import pytest

from fd_core.config import Limits
from fd_core.ops.contract import Array, Forward, Heads, KVCache, KVShape, Norm, Ops, Rope, StepInput
from fd_core.runner.runner import Runner
from fd_core.signals import read
from fd_core.testing.hooks.purity import count_from, counts_of
from fd_core.testing.kit.target import Target
from fd_core.testing.models.arrays import TOLERANCE, activations, assert_near, on_device, raw, step_input
from fd_core.testing.models.layers import NOWHERE, Geometry, LayerOn
from fd_core.testing.models.texts import plan_of
from fd_core.types import Admission, BlockGrant, Revocation, SamplingParams

VOCABULARY: Final = 13
STEPS: Final = 66_000
"""A few more than 2^16."""
SECONDS: Final = 30.0
"""Time after which a slow backend has done enough."""
COUNTED: Final = (2**8, 2**15, 2**16, 2**24, 2**31, 2**32, 2**53, 2**63)
TEXT: Final = 40
BLOCK: Final = 128
CONTEXTS: Final = (9, *(2**power + 1 for power in range(7, 18)), 130)


class Script:
    """A model whose next token is a permutation of the last one, made of two operations of the pack."""

    vocab_size, max_positions, eos_token_ids, architecture = VOCABULARY, 64, (), "script"
    num_parameters, weights, state_size, generates = 0, (), VOCABULARY, True

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.successor = np.roll(np.arange(VOCABULARY), 5)[::-1]
        table = np.zeros((VOCABULARY, VOCABULARY), np.float32)
        table[np.arange(VOCABULARY), self.successor] = 8.0
        self._table = ops.prepare_embedding(raw(table))
        self._head = ops.prepare_linear([raw(np.eye(VOCABULARY, dtype=np.float32))])

    def kv_shape(self, block_size: int) -> KVShape:
        return KVShape(num_layers=1, num_kv_heads=1, head_dim=16, block_size=block_size)

    def states(self, step: StepInput, cache: KVCache) -> Array:
        return self._ops.embedding(self._table, step.token_ids)

    def head(self, states: Array) -> Array:
        return self._ops.logits_of(states, self._head, None)

    def forward(self, step: StepInput, cache: KVCache) -> Array:
        return self.head(self._ops.gather_rows(self.states(step, cache), step.logits_rows))


def test_the_step_after_the_last_of_sixteen_bits_is_right(target: Target, require: Callable[..., None]) -> None:
    """Repeat a greedy and a penalized text, admitted anew each time, in one runner and one cache."""
    ops = type(target.backend)(target.config()).make_ops()
    limits = Limits(
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=64,
        block_size=64,
        num_kv_blocks=2,
        vocab_size=VOCABULARY,
    )
    script = Script(ops)
    runner = Runner(ops, script, limits, target.postprocess)
    expected = [script.successor[3].item()]
    for _ in range(TEXT - 1):
        expected.append(script.successor[expected[-1]].item())
    begun, step, gen = time.monotonic(), 0, 0
    while step < STEPS and time.monotonic() - begun < SECONDS:
        gen += 1
        text = _text(runner, step, gen)
        wrong = [at for at in range(TEXT) if text[at] != expected[at]]
        assert not wrong, f"step {step + wrong[0]}: expected token {expected[wrong[0]]}, got {text[wrong[0]]}"
        step += TEXT
    runner.close()


def _text(runner: Runner, step: int, gen: int) -> list[int]:
    """Admit a request to slot 1, decode it, and revoke that of the text before."""
    text: list[int] = []
    params = SamplingParams(temperature=0.0, max_tokens=TEXT, ignore_eos=True)
    begin: dict[str, Any] = {
        "admissions": (Admission(1, gen, np.array([3], np.int32), 1, params, (), 0),),
        "grants": (BlockGrant(1, 0, np.array([gen % 2], np.int32)),),
    }
    for at in range(TEXT):
        last = at == TEXT - 1
        plan = plan_of(step + at, [(1, gen, at, 1, 0, True)], **(begin if at == 0 else {}))
        output = runner.execute(plan)
        outcomes = read(output.tokens, output.errors)
        assert not output.errors, f"step {step + at}: {output.errors}"
        assert outcomes.counts.tolist() == [0, 1], f"step {step + at}: expected a token of slot 1 only"
        text.append(int(outcomes.tokens[1, 0]))
        if last:
            runner.execute(plan_of(step + at, [], revocations=(Revocation(1, gen),)))
    return text


def test_attention_is_right_after_many_launches(target: Target, require: Callable[..., None]) -> None:
    """Attend with the queries of two steps in turns; a stale result is the other one's."""
    require("primitives", "kv_transfer")
    layer = LayerOn(type(target.backend)(target.config()).make_ops(), Geometry(), [(1, 5), (1, 9)])
    ops, begun, right = layer.ops, time.thread_time(), list[Any]()
    rows = [ops.from_host(np.array(order, np.int32)) for order in ([0, 1], [1, 0])]
    q = ops.attention_inputs(activations(ops, layer.x), layer.norm, layer.qkv, layer.heads, layer.kv, layer.step)
    queries = [ops.gather_rows(q, order) for order in rows]
    for number in range(STEPS):
        found = np.array(ops.to_host(ops.attention(queries[number % 2], layer.heads, layer.kv, layer.step)))
        right += [found] if number < 2 else []
        assert np.array_equal(found, right[number % 2]), f"launch {number} of attention has another result"
        if time.thread_time() - begun > SECONDS / 3:
            break


def test_attention_is_right_at_any_number_of_steps(target: Target, require: Callable[..., None]) -> None:
    """Move what counts the steps, in the pack or the cache, to where 16 to 64 bits and float32 end."""
    require("primitives", "kv_transfer")
    layer = LayerOn(type(target.backend)(target.config()).make_ops(), Geometry(), [(1, 5), (1, 9)])
    ops, kept = layer.ops, (layer.ops, layer.cache)
    q = ops.attention_inputs(activations(ops, layer.x), layer.norm, layer.qkv, layer.heads, layer.kv, layer.step)

    def attended() -> list[Any]:
        rows = [[(1, 5 - less), (1, 9 - less)] for less in range(4)]
        steps = [on_device(ops, step_input(each, layer.g.block_size, layer.blocks)) for each in rows]
        return [np.array(ops.to_host(ops.attention(q, layer.heads, layer.kv, step))) for step in steps]

    def numbers() -> list[dict[str, float]]:
        attended()
        return [{path: value for path, (*_, value) in counts_of(each).items()} for each in kept]

    right, readings = attended(), [numbers() for _ in range(3)]
    for number in COUNTED:
        for thing, first, second, third in zip(kept, *readings, strict=True):
            steady = {path for path in first.keys() & second.keys() & third.keys() if first[path] < second[path]}
            counts = {path: first[path] for path in steady if third[path] - second[path] == second[path] - first[path]}
            count_from(thing, counts, number)
        for found in (attended(), attended()):
            wrong = [at for at in range(4) if not np.array_equal(found[at], right[at])]
            assert not wrong, f"after about {number:,} steps, attention has the result of another step"


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
