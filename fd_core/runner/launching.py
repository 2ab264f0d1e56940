"""A step between the moments when it is launched and when it is answered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy.typing as npt

from fd_core.ops.contract import Array, HostCopies, StepInput
from fd_core.runner.inputs.inputs import Fed, Rows
from fd_core.runner.pooling import PooledParts
from fd_core.runner.sampling.prompt_scores import PromptScores
from fd_core.runner.sampling.sampler import Sampled, SamplingWork
from fd_core.types import IntArray, LogprobRows, PooledRows, PromptLogprobRows, StepPlan

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
    """int32[N * (1 + k)], `Rows.cells`; None where k is 0, and on the host where no row has drafts."""
    drafts: tuple[Array, Array] | None
    """int32[N, k] and how many of each row are drafts, int32[N]; None for a step without drafts."""
    unsampled: tuple[Array, ...]
    """Tokens int32[0, 1 + k] and peaks float32[0] where no row samples; else nothing."""


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

    def extras(
        self, arrays: Iterable[npt.NDArray[Any]]
    ) -> tuple[LogprobRows | None, PromptLogprobRows | None, PooledRows | None]:
        """Return what there is of log-probabilities, prompt scores and vectors, given their arrays of `copies`."""
        found = iter(arrays)
        sampled, (scores, pooled) = self.sampled, self.read
        slots, columns = self.rows.logits_slots[sampled.scored], self.rows.columns[sampled.scored]
        return (
            LogprobRows(slots, columns, *islice(found, len(sampled.scores))) if sampled.scores else None,
            None if scores is None else scores.on_host([*islice(found, len(scores.arrays))]),
            None if pooled is None else pooled.on_host([*found]),
        )
