"""Faults in the handling of token id 0, which is a token like any other: invariant 1.9."""

from __future__ import annotations

from tests.mutants.mutant import mutant

SLOTS = "scheduling/running/slots.py"
SAMPLING = "runner/sampling/sampler.py"

_INVARIANT = "1.9: token id 0 is a valid token"

MUTANTS = (
    mutant(
        "stop-token-zero-is-ignored",
        _INVARIANT,
        (
            SLOTS,
            "self.stops[slot, : len(ids)] = ids",
            "self.stops[slot, : len(ids)] = [each or NO_TOKEN for each in ids]",
        ),
    ),
    mutant(
        "eos-token-zero-is-ignored",
        _INVARIANT,
        (SLOTS, "*spec.eos_token_ids)", "*filter(None, spec.eos_token_ids))"),
    ),
    mutant(
        "stop-token-zero-is-allowed-before-min-tokens",
        _INVARIANT,
        (
            SAMPLING,
            "stops=np.array([token for token in ends if token in",
            "stops=np.array([token for token in ends if 0 < token in",
        ),
    ),
    mutant(
        "logit-bias-of-token-zero-alone-is-ignored",
        _INVARIANT,
        (SAMPLING, "if len(extras.bias_ids):", "if extras.bias_ids.any():"),
    ),
    mutant(
        "drafts-end-before-token-zero",
        _INVARIANT,
        (
            "runner/batch.py",
            "        self.num_drafts[slots] = counts\n",
            "        some = (drafts == 0) & (np.arange(drafts.shape[1]) < counts[:, None])\n"
            "        self.num_drafts[slots] = np.where(some.any(axis=1), some.argmax(axis=1), counts)\n",
        ),
    ),
    mutant(
        "draft-zero-is-never-accepted",
        _INVARIANT,
        (
            "ops/numpy/sampling.py",
            "right = (sampled[:, :k] == drafts) & (",
            "right = (sampled[:, :k] == drafts) & (drafts > 0) & (",
        ),
    ),
)
