"""Plans that exercise a runner before its first request."""

from __future__ import annotations

import numpy as np

from fd_core.types import Admission, BlockGrant, SamplingParams, StepPlan

__all__ = ["warm_up_plans"]


def warm_up_plans(length: int, block_size: int) -> list[StepPlan]:
    """Return a prefill of `length` tokens in slot 0 and one decode after it; blocks 0 and up are overwritten."""
    blocks = np.arange(-(-(length + 1) // block_size), dtype=np.int32)
    admission = Admission(
        slot=0,
        gen=0,
        token_ids=np.zeros(length, np.int32),
        prompt_len=length,
        params=SamplingParams(temperature=0.0),
        eos_token_ids=(),
        computed=0,
    )
    prefill = _one_row(0, 0, length, (admission,), (BlockGrant(0, 0, blocks),))
    return [prefill, _one_row(1, length, 1)]


def _one_row(
    step: int,
    start: int,
    num_tokens: int,
    admissions: tuple[Admission, ...] = (),
    grants: tuple[BlockGrant, ...] = (),
) -> StepPlan:
    def one(value: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array([value], np.int32)

    return StepPlan(
        epoch=0,
        step=step,
        slots=one(0),
        gens=one(0),
        starts=one(start),
        num_tokens=one(num_tokens),
        num_drafts=one(0),
        samples=np.ones(1, np.bool_),
        admissions=admissions,
        grants=grants,
    )
