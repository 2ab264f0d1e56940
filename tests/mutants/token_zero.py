"""Faults against token id 0, which is a token like every other: law 1.9."""

from __future__ import annotations

from tests.mutants.mutant import mutant

SLOTS = "scheduling/running/slots.py"
SAMPLING = "runner/sampling/sampler.py"

_LAW = "1.9: token id 0 is a token"

MUTANTS = (
    mutant(
        "stop-token-zero-is-no-stop-token",
        _LAW,
        (
            SLOTS,
            "self.stops[slot, : len(ids)] = ids",
            "self.stops[slot, : len(ids)] = [each or NO_TOKEN for each in ids]",
        ),
    ),
    mutant(
        "end-of-text-zero-ends-nothing",
        _LAW,
        (SLOTS, "*spec.eos_token_ids)", "*filter(None, spec.eos_token_ids))"),
    ),
    mutant(
        "stop-token-zero-may-come-before-min-tokens",
        _LAW,
        (
            SAMPLING,
            "stops=np.array([token for token in ends if token in",
            "stops=np.array([token for token in ends if 0 < token in",
        ),
    ),
    mutant(
        "a-bias-of-token-zero-alone-is-left-out",
        _LAW,
        (SAMPLING, "if len(extras.bias_ids):", "if extras.bias_ids.any():"),
    ),
    mutant(
        "drafts-end-before-token-zero",
        _LAW,
        (
            "runner/batch.py",
            "        self.num_drafts[slots] = counts\n",
            "        some = (drafts == 0) & (np.arange(drafts.shape[1]) < counts[:, None])\n"
            "        self.num_drafts[slots] = np.where(some.any(axis=1), some.argmax(axis=1), counts)\n",
        ),
    ),
    mutant(
        "draft-zero-is-never-right",
        _LAW,
        (
            "ops/numpy/sampling.py",
            "right = (sampled[:, :k] == drafts) & (",
            "right = (sampled[:, :k] == drafts) & (drafts > 0) & (",
        ),
    ),
)
