"""Requests of the scheduler kit and their expected texts, from the null model's runner.

Computed without a scheduler: each request alone in a slot, one step per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.backends.null import NullBackend, NullModel
from fd_core.config import EngineConfig, Limits
from fd_core.runner.drafting import Drafter
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess
from fd_core.runner.runner import Runner
from fd_core.testing.models.texts import greedy, plan_of
from fd_core.types import Admission, BlockGrant, IntArray, RequestSpec, SamplingParams, StepPlan

NULL_IDS: Final = 257
"""Vocabulary of the null model, unless a case has a larger one."""
PROMPTS: list[list[int]] = np.random.default_rng(1).integers(0, 256, (1000, 16)).tolist()


def make_runner(limits: Limits, drafter: Drafter | None = None) -> Runner:
    """Return a runner of the null model."""
    ops = NullBackend(EngineConfig(model="null", backend="null")).make_ops()
    model = NullModel(limits.vocab_size, limits.max_model_len)
    return Runner(ops, model, limits, postprocess=NumpyPostprocess, drafter=drafter)


def runnable(plan: StepPlan) -> StepPlan:
    """Return a plan without grammars, reasoning and adapters: the null model has none, so they change no text."""
    admissions = (replace(each, params=_without_grammar(each.params), adapter="") for each in plan.admissions)
    return replace(plan, admissions=tuple(admissions)) if plan.admissions else plan


def _without_grammar(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, grammar=None, reasoning=None)


def whole_texts(
    specs: Sequence[RequestSpec], max_model_len: int | None = None, vocab_size: int = NULL_IDS
) -> list[list[int]]:
    """Return all tokens that each request generates in a context, also those delivered by earlier epochs.

    Those of unknown ones are computed together.
    """
    plain = [_plain(spec, max_model_len) for spec in specs]
    keys = [(vocab_size, msgspec.json.encode(spec)) for spec in plain]
    unknown = {key: spec for key, spec in zip(keys, plain, strict=True) if key not in _TEXTS}
    if unknown:
        _, texts = _generated([*unknown.values()], 64, vocab_size)
        _TEXTS.update(zip(unknown, texts, strict=True))
    return [[*_TEXTS[key]] for key in keys]


_TEXTS: dict[tuple[int, bytes], list[int]] = {}


def _plain(spec: RequestSpec, max_model_len: int | None) -> RequestSpec:
    """Return a request with the same text, and without everything that does not change it."""
    params = msgspec.structs.replace(_without_grammar(spec.params), logprobs=None, prompt_logprobs=None)
    if max_model_len is not None:
        params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, max_model_len - len(spec.prompt)))
    return RequestSpec(request_id="alone", prompt=spec.prompt, params=params, eos_token_ids=spec.eos_token_ids)


def kv_of(tokens: IntArray, block_size: int) -> npt.NDArray[np.float32]:
    """Return the KV of a prompt in blocks, as `KVCache.export_blocks` does."""
    runner, _ = _generated([greedy("alone", tokens.tolist(), 1)], block_size)
    return runner.cache.export_blocks(np.arange(-(-len(tokens) // block_size), dtype=np.int32))


def _generated(
    specs: Sequence[RequestSpec], block_size: int, vocab_size: int = NULL_IDS
) -> tuple[Runner, list[list[int]]]:
    """Generate a text in each slot: first all prompts, then one token of each text that did not end in a step."""
    lengths = [len(spec.prompt) + spec.params.max_tokens for spec in specs]
    counts = [-(-length // block_size) for length in lengths]
    limits = Limits(
        max_num_seqs=len(specs),
        max_num_batched_tokens=sum(lengths),
        max_model_len=max(lengths),
        block_size=block_size,
        num_kv_blocks=sum(counts),
        vocab_size=vocab_size,
    )
    runner, texts = make_runner(limits), [list[int]() for _ in specs]
    first = np.cumsum([0, *counts], dtype=np.int32)
    admissions = tuple(
        Admission(slot, 1, np.array(spec.prompt, np.int32), len(spec.prompt), spec.params, spec.eos_token_ids, 0)
        for slot, spec in enumerate(specs)
    )
    grants = tuple(
        BlockGrant(slot, 0, np.arange(first[slot], first[slot + 1], dtype=np.int32)) for slot in range(len(specs))
    )
    rows = [(slot, 1, 0, len(spec.prompt), 0, True) for slot, spec in enumerate(specs)]
    step = 0
    while rows:
        parts = {} if step else {"admissions": admissions, "grants": grants}
        tokens = runner.execute(plan_of(step, rows, **parts)).tokens
        for slot, *_ in rows:
            texts[slot].append(int(tokens[slot, 0]))
        rows = [
            (slot, 1, len(specs[slot].prompt) + len(texts[slot]) - 1, 1, 0, True)
            for slot, *_ in rows
            if not _ended(specs[slot], texts[slot])
        ]
        step += 1
    return runner, texts


def _ended(spec: RequestSpec, text: list[int]) -> bool:
    params = spec.params
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else spec.eos_token_ids)}
    return len(text) >= params.max_tokens or text[-1] in ends
