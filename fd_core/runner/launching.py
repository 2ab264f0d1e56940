"""A step between the moments when it is launched and when it is answered."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import Array, HostCopies, StepInput
from fd_core.runner.inputs.inputs import Rows
from fd_core.runner.inputs.last_tokens import Fed
from fd_core.runner.pooling import PooledParts
from fd_core.runner.sampling.prompt_scores import PromptScores
from fd_core.runner.sampling.sampler import Sampled, SamplingWork
from fd_core.types import IntArray, LogprobRows, PooledRows, PromptLogprobRows, StepPlan

__all__ = ["LaunchedStep", "Readings", "StepAnswer", "StepWork"]

Readings = tuple[PromptScores | None, PooledParts | None]
"""What a step read from prompts, on the device."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The arrays of a step of which N rows sample: gathered on the host, then uploaded all at once."""

    inputs: StepInput | None
    """None for a step without rows."""
    fed: Fed | None
    sampling: SamplingWork | None
    """None where no row samples."""
    slots: Array
    """int32[N]"""
    revoked: Array
    """int32[M]"""
    undrafted: Array
    """int32[N], zeros: what rows without drafts accept of them."""
    cells: Array | None
    """int32[N * (1 + k)], `Rows.cells`; None where k is 0."""
    drafts: tuple[Array, Array] | None
    """int32[N, k] and how many of each row are drafts, int32[N]; None for a step without drafts."""
    unsampled: tuple[Array, ...]
    """Tokens int32[0, 1 + k] and peaks float32[0] where no row samples; else nothing."""


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """What came over from the device."""

    tokens: IntArray
    """int32[max_num_seqs, 1 + k], the token matrix."""
    accepted: IntArray
    """int32[N], the drafts that each sampling row keeps."""
    peaks: npt.NDArray[np.float32]
    """float32[R], see `Ops.sample`."""
    logprobs: LogprobRows | None
    prompt_logprobs: PromptLogprobRows | None
    pooled: PooledRows | None


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device computes, or has computed."""

    plan: StepPlan
    rows: Rows
    gens: IntArray
    """int32[max_num_seqs], the generation that each slot held when the step was launched."""
    begins: IntArray
    """int32[N], where the first token of each sampling row will stand in its text."""
    sampled: Sampled
    read: Readings
    copies: HostCopies
    """Token matrix, accepted drafts, peaks, then what there is of log-probabilities, prompt scores and vectors."""

    def answer(self) -> StepAnswer:
        """Wait for this step, and return what it computed."""
        tokens, accepted, peaks, *more = self.copies.wait()
        found = iter(more)
        of_tokens, of_prompts, of_vectors = (
            [*islice(found, len(group))] for group in result_groups(self.sampled, self.read)
        )
        scored, (scores, pooled) = self.sampled.scored, self.read
        return StepAnswer(
            tokens,
            accepted,
            peaks,
            LogprobRows(self.rows.logits_slots[scored], self.rows.columns[scored], *of_tokens) if of_tokens else None,
            None if scores is None else scores.on_host(of_prompts),
            None if pooled is None else pooled.on_host(of_vectors),
        )


def result_groups(sampled: Sampled, read: Readings) -> tuple[tuple[Array, ...], ...]:
    """Return arrays that only some steps have: log-probabilities, prompt scores, vectors."""
    scores, pooled = read
    return sampled.scores, () if scores is None else scores.parts, () if pooled is None else pooled.arrays
