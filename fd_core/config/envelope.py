"""Operating envelope of a plugin: the largest sizes that it supports, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from fd_core.errors import ConfigError, ModelError

__all__ = ["OperatingEnvelope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingEnvelope:
    """Largest sizes that a plugin supports; None for whatever settings and models ask for.

    Backends, schedulers, postprocessors and KV stores declare one as `envelope`. The engine rejects settings and models
    beyond it at start, and the conformance kit tests at its edge, just inside, and nothing beyond.
    """

    max_num_seqs: int | None = None
    """Slots of a batch, and rows of a step."""
    max_num_batched_tokens: int | None = None
    """Tokens of a step."""
    max_model_len: int | None = None
    """Tokens of a context. Without `--max-model-len` the engine uses it instead of the length of the model."""
    block_size: int | None = None
    """Tokens of a KV block."""
    max_drafts: int | None = None
    """Draft tokens of a row; tokens that a grammar forces count as drafts."""
    pipeline_depth: int | None = None
    """Steps in flight."""
    max_loras: int | None = None
    """Adapters on the device at once."""
    max_lora_rank: int | None = None
    vocab_size: int | None = None
    hidden: int | None = None
    """Width of the residual stream."""
    inner: int | None = None
    """Inner width of a feed-forward block, or of one expert."""
    head_dim: int | None = None
    group: int | None = None
    """Query heads that share a KV head."""
    experts: int | None = None
    top_k: int | None = None
    """Experts of a token."""
    value_bytes: int | None = None
    """Bytes of a value in a KV store: the KV of one block, and less than a kilobyte more."""

    def __post_init__(self) -> None:
        for name, limit in self.limits().items():
            if type(limit) is not int or limit < 1:
                raise ValueError(f"envelope: {name}={limit!r} is not a positive integer; None means no limit")

    def limits(self) -> dict[str, int]:
        """Return the declared limits by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: limit for name, limit in values.items() if limit is not None}

    def exceeded(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the limits that some sizes exceed; names that are no fields have no limit."""
        return {name: limit for name, limit in self.limits().items() if sizes.get(name, 0) > limit}

    def require(self, sizes: Mapping[str, int], owner: str) -> None:
        """Raise `ConfigError` for a setting beyond the envelope of `owner`, `ModelError` for a size of the model."""
        for name, limit in self.exceeded(sizes).items():
            beyond = f"{name}={sizes[name]} exceeds the limit of {owner} ({limit})"
            if name in _OF_THE_MODEL:
                raise ModelError(
                    f"the model's {beyond}", hint=f"use a model with at most {limit}, or another --backend"
                )
            flag, remedy = _FLAGS.get(name, (f"--{name.replace('_', '-')}", "use at most {limit}"))
            raise ConfigError(beyond, field=flag, hint=remedy.format(limit=limit))


_OF_THE_MODEL: Final = ("vocab_size", "hidden", "inner", "head_dim", "group", "experts", "top_k")
_FLAGS: Final[Mapping[str, tuple[str, str]]] = {
    "max_drafts": ("--speculative-config", "use at most {limit} num_speculative_tokens and --max-forced-tokens"),
    "value_bytes": ("--block-size", "use smaller blocks: a value holds one"),
}
"""Flag and remedy of sizes that have no flag of their name."""
