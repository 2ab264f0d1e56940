"""The first steps of a runner, which no request waits for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fd_core.types import Admission, BlockGrant, SamplingParams, StepPlan

__all__ = ["warm_up_plans"]


def warm_up_plans(length: int, block_size: int) -> tuple[StepPlan, StepPlan]:
    """Return a prefill of `length` tokens in slot 0 and one decode after it; blocks 0 and up are overwritten."""
    blocks = np.arange(-(-(length + 1) // block_size), dtype=np.int32)
    params = SamplingParams(temperature=0.0)
    zero = np.zeros(1, np.int32)
    prefill = StepPlan(
        epoch=0,
        step=0,
        slots=zero,
        gens=zero,
        starts=zero,
        num_tokens=np.full(1, length, np.int32),
        num_drafts=zero,
        samples=np.ones(1, np.bool_),
        admissions=(Admission(0, 0, np.zeros(length, np.int32), length, params, eos_token_ids=(), computed=0),),
        grants=(BlockGrant(0, 0, blocks),),
    )
    one = np.ones(1, np.int32)
    return prefill, replace(prefill, step=1, starts=prefill.num_tokens, num_tokens=one, admissions=(), grants=())
