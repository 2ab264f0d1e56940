"""Counters: more steps than 16 bits count, on a model that takes almost no time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from fd_core.config import Limits
from fd_core.ops.contract import Array, KVCache, KVShape, Ops, StepInput
from fd_core.runner.runner import Runner
from fd_core.signals import read
from fd_core.testing.kit.target import Target
from fd_core.testing.models.arrays import raw
from fd_core.testing.stepping.texts import plan_of
from fd_core.types import Admission, BlockGrant, Revocation, SamplingParams

VOCABULARY: Final = 13
STEPS: Final = 66_000
"""A few more than 2^16."""
SECONDS: Final = 30.0
"""Time after which a slow backend has done enough."""
TEXT: Final = 40


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
