"""The part of the pack that works on logits and token ids: whatever kernels there are for it."""

from __future__ import annotations

from fd_core.ops.contract import Array, PenaltyInput, SampleInput
from fd_core.ops.torch.sampling import TorchSampling

from fd_gpu_cuda.kernel_table import Kernels


class SamplingOps(TorchSampling):
    """Sampling and what comes before and after it, each by the kernels of the pack's table."""

    _kernels: Kernels

    def sample(self, logits: Array, rows: SampleInput) -> tuple[Array, Array]:
        """Choose a token for each row."""
        return self._kernels.sampling.sample(logits, rows)

    def add_at(self, x: Array, rows: Array, ids: Array, values: Array) -> Array:
        """Add values to single cells, in place."""
        return self._kernels.sampling.add_at(x, rows, ids, values)

    def penalize(self, logits: Array, penalties: PenaltyInput) -> Array:
        """Apply repetition, presence and frequency penalties, in place."""
        return self._kernels.sampling.penalize(logits, penalties)

    def mask_logits(self, logits: Array, rows: Array, bits: Array) -> Array:
        """Forbid tokens by packed bits, in place."""
        return self._kernels.sampling.mask_logits(logits, rows, bits)

    def logprobs(self, logits: Array, tokens: Array, top_n: int) -> tuple[Array, Array, Array]:
        """Return log-probabilities of the chosen tokens, and the most likely tokens with theirs."""
        return self._kernels.sampling.logprobs(logits, tokens, top_n)

    def ranks(self, logits: Array, tokens: Array) -> Array:
        """Count the tokens that are more likely, and as likely with a lower id."""
        return self._kernels.sampling.ranks(logits, tokens)

    def verify(self, sampled: Array, drafts: Array, num_drafts: Array) -> Array:
        """Count the drafts that equal what was sampled in their place, up to the first that does not."""
        return self._kernels.sampling.verify(sampled, drafts, num_drafts)

    def token_matrix(self, sampled: Array, accepted: Array, slots: Array, revoked: Array, num_slots: int) -> Array:
        """Return the token matrix of a step; `CudaPostprocess` asks for it."""
        return self._kernels.sampling.token_matrix(sampled, accepted, slots, revoked, num_slots)
