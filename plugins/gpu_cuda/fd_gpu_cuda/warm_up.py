"""Which steps compile all that serving needs, beside the longest prefill and the decodes that are captured.

A kernel compiles for each of its constants, and those depend on how many tokens a step has, how many of them a request
has, how many rows are sampled and how. Tiles are powers of two, so steps of each power of two meet all of them; one
token more than that meets what begins behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fd_core.config import Limits
from fd_core.ops.warm_up import WarmUpRow, WarmUpStep
from fd_core.types import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
_RANDOM = SamplingParams(temperature=1.0)
_FILTERED = SamplingParams(temperature=1.0, top_k=2, top_p=0.9, min_p=0.01)
_OTHERS = (
    SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=20),
    SamplingParams(temperature=0.0, prompt_logprobs=0),
    SamplingParams(temperature=0.0, prompt_logprobs=20),
    SamplingParams(temperature=0.0, logit_bias={0: 1.0}),
    SamplingParams(temperature=0.0, allowed_token_ids=(0,)),
)
"""What few requests ask for, each with kernels of its own. A bias twice in a step."""


def warm_up_steps(limits: Limits, *, drafts: bool) -> Sequence[WarmUpStep]:
    """Return the steps in the order of how likely requests need them; `drafts` says whether steps may have any."""
    return [*_prompts(limits), *_decodes(limits, limits.max_drafts if drafts else 0), *_wishes(limits)]


def _prompts(limits: Limits) -> Iterator[WarmUpStep]:
    """One prompt of each size, many prompts of few tokens, and a prompt beside decodes."""
    most = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
    for power in _powers(most):
        for tokens in sorted({power, min(power + 1, most)}):
            yield (WarmUpRow(tokens),)
    for tokens in (2, 17, 65):
        rows = min(limits.max_num_seqs, limits.max_num_batched_tokens // tokens)
        yield (WarmUpRow(tokens),) * rows
    decodes = min(limits.max_num_seqs - 1, 8)
    yield (WarmUpRow(min(most, limits.max_num_batched_tokens - decodes)), *(WarmUpRow(),) * decodes)


def _decodes(limits: Limits, most_drafts: int) -> Iterator[WarmUpStep]:
    """Decodes of each size, sampled in each way, with the most drafts and with fewer."""
    for rows in sorted({*_powers(limits.max_num_seqs), limits.max_num_seqs}):
        for params in (_GREEDY, _RANDOM, _FILTERED):
            yield (WarmUpRow(params=params),) * rows
        for drafts in sorted({1, most_drafts}) if most_drafts else ():
            fitting = min(rows, limits.max_num_batched_tokens // (1 + drafts))
            for params in (_GREEDY, _RANDOM, _FILTERED):
                yield (WarmUpRow(4, drafts, params),) * fitting


def _wishes(limits: Limits) -> Iterator[WarmUpStep]:
    """What few requests ask for: by one request, and by some of several."""
    for params in _OTHERS:
        tokens = 3 if params.prompt_logprobs is not None else 1
        asking = WarmUpRow(tokens, params=params)
        yield (asking,)
        yield (asking, asking, *(replace(asking, params=_GREEDY),) * 2)


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
