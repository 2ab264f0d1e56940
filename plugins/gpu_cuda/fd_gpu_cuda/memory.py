"""What of a device's memory is kept for steps: measured in a rehearsal, or calculated where there is none."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fd_core.backends.contract import Model
from fd_core.config import EngineConfig, step_budget
from fd_core.runner.sampling.prompt_scores import SCORED_CELLS

if TYPE_CHECKING:
    from fd_gpu_cuda.device import Cuda
    from fd_gpu_cuda.ops import CudaOps


GRAPH_BYTES = 256 * 2**20
"""Calculated for captured graphs, workspaces of libraries and compiled kernels."""
NCCL_BYTES = 512 * 2**20
"""Calculated for the buffers of NCCL where several ranks compute one model."""
_BYTES_PER_HIDDEN = 96
"""A token's activations for each element of the hidden state: the residual, what a norm holds in float32, queries, keys
and values, and gate and up, which are some five times as wide."""
_BYTES_PER_LOGIT = 48
"""Logits in float32, and what sampling with filters holds beside them: weights and running sums in float64, and the
order as int64."""


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Bytes that KV must leave."""

    steps: int
    """For the largest step, and all that libraries and graphs take that were there when it was measured."""
    graphs: int
    """For graphs that were not captured then: what one more of them took, for each."""
    how: str
    """`measured` or `calculated`."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.steps + self.graphs

    def __str__(self) -> str:
        return f"{self.total / 2**20:,.0f} MiB {self.how} for steps and graphs"


def measured(cuda: Cuda, ops: CudaOps, steps: AbstractContextManager[None]) -> KeptMemory:
    """Measure what a rehearsal takes of what the driver has, its small KV cache included.

    What the process keeps when all is given back, such as kernels and connections, is gone for KV anyway.
    """
    cuda.release_unused()
    before = cuda.free_on_driver()
    with ops.rehearsing(), steps:
        taken = before - cuda.free_on_driver()
        graphs = ops.graph_bytes_to_come
    cuda.release_unused()
    kept = before - cuda.free_on_driver()
    return KeptMemory(max(taken - kept, 0), graphs, "measured")


def calculated(config: EngineConfig, model: Model | None, default_budget: int) -> KeptMemory:
    """Calculate it from sizes, without a look at the device."""
    graphs = GRAPH_BYTES + (NCCL_BYTES if config.tensor_parallel_size > 1 else 0)
    return KeptMemory(0 if model is None else _largest_step(config, model, default_budget), graphs, "calculated")


def _largest_step(config: EngineConfig, model: Model, default_budget: int) -> int:
    width = 1 + (0 if config.speculative is None else config.speculative.num_speculative_tokens)
    budget = step_budget(config, default_budget)
    table: Any = getattr(getattr(model, "decoder", None), "embedding", None)
    return step_bytes(
        tokens=budget,
        # Beside those that are sampled from, the logits of prompts whose log-probabilities are wanted.
        rows=min(config.max_num_seqs * width, budget) + max(SCORED_CELLS // model.vocab_size, 1),
        hidden=model.vocab_size // 8 if table is None else int(table.shape[1]),
        vocabulary=model.vocab_size,
    )


def step_bytes(*, tokens: int, rows: int, hidden: int, vocabulary: int) -> int:
    """Return what the largest step takes beside weights and KV: `tokens` computed, logits of `rows` of them."""
    return tokens * hidden * _BYTES_PER_HIDDEN + rows * vocabulary * _BYTES_PER_LOGIT
