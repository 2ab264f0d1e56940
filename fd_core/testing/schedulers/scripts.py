"""Requests of the scheduler kit and their expected texts, from the null model's runner.

Computed without a scheduler: one request, one slot, one step per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.backends.null import NullBackend, NullModel
from fd_core.config import EngineConfig, Limits
from fd_core.runner.drafting import Drafter
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess
from fd_core.runner.runner import Runner
from fd_core.testing.stepping.texts import greedy, plan_of
from fd_core.types import Admission, BlockGrant, IntArray, RequestSpec, SamplingParams

PROMPTS: list[list[int]] = np.random.default_rng(1).integers(0, 256, (1000, 16)).tolist()
_ALONE = Limits(
    max_num_seqs=1, max_num_batched_tokens=4096, max_model_len=4096, block_size=64, num_kv_blocks=64, vocab_size=257
)


def make_runner(limits: Limits, drafter: Drafter | None = None) -> Runner:
    """Return a runner of the null model."""
    ops = NullBackend(EngineConfig(model="null", backend="null")).make_ops()
    return Runner(ops, NullModel(), limits, postprocess=NumpyPostprocess, drafter=drafter)


def whole_text(spec: RequestSpec) -> list[int]:
    """Return all tokens that a request generates, including those delivered by earlier epochs."""
    plain = RequestSpec(request_id="alone", prompt=spec.prompt, params=spec.params, eos_token_ids=spec.eos_token_ids)
    return list(_text(msgspec.json.encode(plain)))


@cache
def _text(encoded: bytes) -> tuple[int, ...]:
    spec = msgspec.json.decode(encoded, type=RequestSpec)
    params = spec.params
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else spec.eos_token_ids)}
    text: list[int] = []
    steps = _steps(make_runner(_ALONE), _ALONE, spec)
    while len(text) < params.max_tokens and not (text and text[-1] in ends):
        text.append(next(steps))
    return tuple(text)


def kv_of(tokens: IntArray, block_size: int) -> npt.NDArray[np.float32]:
    """Return the KV of a prompt in blocks, as `KVCache.export_blocks` does."""
    count = -(-len(tokens) // block_size)
    limits = msgspec.structs.replace(_ALONE, block_size=block_size, num_kv_blocks=count)
    runner = make_runner(limits)
    next(_steps(runner, limits, greedy("alone", tokens.tolist(), 1)))
    return runner.cache.export_blocks(np.arange(count, dtype=np.int32))


def _steps(runner: Runner, limits: Limits, spec: RequestSpec) -> Iterator[int]:
    """Yield the tokens of a request that runs alone."""
    prompt = np.array(spec.prompt, np.int32)
    blocks: IntArray = np.arange(limits.num_kv_blocks, dtype=np.int32)
    admission = Admission(0, 1, prompt, len(prompt), spec.params, spec.eos_token_ids, 0)
    computed = 0
    while True:
        first = computed == 0
        count = len(prompt) if first else 1
        plan = plan_of(
            0,
            [(0, 1, computed, count, 0, True)],
            admissions=(admission,) if first else (),
            grants=(BlockGrant(0, 0, blocks),) if first else (),
        )
        yield int(runner.execute(plan).tokens[0, 0])
        computed += count


@cache
def text_with_zero() -> RequestSpec:
    """Return a request with token 0 inside its text, neither first nor last."""
    for index, prompt in enumerate(PROMPTS):
        spec = greedy(f"zero{index}", [0, *prompt[:5]], 24)
        if 0 in whole_text(spec)[2:20]:
            return spec
    raise AssertionError("the null model never generates 0")


@cache
def many_specs() -> tuple[RequestSpec, ...]:
    """Return requests of every kind: random, greedy, common prefixes, scored prompts, salts, stops, restarts, zeros."""
    rng = np.random.default_rng(13)
    specs = [
        RequestSpec(
            request_id=f"r{index}",
            prompt=tuple(rng.integers(0, 256, int(rng.integers(1, 20))).tolist()),
            params=SamplingParams(
                max_tokens=42, temperature=float(index % 2), seed=index, logprobs=2 if index % 3 == 0 else None
            ),
            eos_token_ids=(256,),
        )
        for index in range(10)
    ]
    prefix = tuple(range(100, 112))
    asked = [None, None, 0, None, 2]
    specs += [greedy(f"shared{at}", (*prefix, at), 40, prompt_logprobs=top_n) for at, top_n in enumerate(asked)]
    specs += [greedy(f"salt{salt}", (*prefix, 0), 40, cache_salt=salt) for salt in ("tenant-1", "tenant-10", "other")]
    for index, spec in enumerate(specs[10:13]):
        stop = whole_text(spec)[6 * index + 5]
        specs.append(greedy(f"stop{index}", spec.prompt, 40, stop_token_ids=(stop,)))
    zero = text_with_zero()
    stopping = msgspec.structs.replace(zero.params, stop_token_ids=(0,))
    specs += [zero, msgspec.structs.replace(zero, request_id="zero stop", params=stopping)]
    for spec in specs[:2]:
        begun = tuple(whole_text(spec)[:7])
        specs.append(msgspec.structs.replace(spec, request_id=f"{spec.request_id} again", delivered=begun[:-1]))
    return tuple(specs)
