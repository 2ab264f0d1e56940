"""From user settings to a deployment that can be simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fd_core.config import EngineConfig, resolve_limits
from fd_core.errors import ConfigError
from fd_core.router.config import RouterConfig
from fd_core.router.workers import Role
from fd_core.simulation.costs.profile import CostProfile, Costs
from fd_core.simulation.engines.engine import SimulatedPool
from fd_core.simulation.storage.storage import SharedStore
from fd_core.simulation.world import SimulatedDeployment

_MAX_WORKERS: Final = 10_000
_MAX_ROUTERS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings of a simulation, in the terms of the command line; the rest is as in `SimulatedDeployment`."""

    profile: CostProfile
    workers: int = 1
    """Workers that prefill and decode."""
    prefill: int = 0
    decode: int = 0
    routers: int | None = None
    """None takes one, or none for a single worker."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Explicit fields of `EngineConfig`; the profile sets the others."""
    router: Mapping[str, Any] = field(default_factory=dict)
    """Explicit fields of `RouterConfig`."""
    acceptance: float = 0.7
    """Probability that a draft is accepted, if those before it were; for engines that draft."""
    shared_store: bool = False
    spare_processors: int | None = None
    """Processors that a worker's steps leave to its server; None takes the profile's."""
    relay: float = 0.0
    crowding: tuple[float, float] | None = None
    latency: float = 0.0002

    def deployment(self, label: str, *, check: bool = True) -> SimulatedDeployment:
        """Return the deployment. Raises `ConfigError` for settings that contradict each other."""
        self._require_sense()
        counts: dict[Role, int] = {"mixed": self.workers, "prefill": self.prefill, "decode": self.decode}
        pools = tuple(self._pool(role, count) for role, count in counts.items() if count)
        alone = sum(counts.values()) == 1
        return SimulatedDeployment(
            label=label,
            groups=pools,
            routers=(0 if alone else 1) if self.routers is None else self.routers,
            router=RouterConfig(**self.router),
            store=SharedStore if self.shared_store else None,
            latency=self.latency,
            relay=self.relay,
            crowding=self.crowding,
            check=check,
        )

    def _require_sense(self) -> None:
        total = self.workers + self.prefill + self.decode
        if not 1 <= total <= _MAX_WORKERS:
            raise ConfigError(f"expected 1 to {_MAX_WORKERS:,} workers, got {total}", field="--workers")
        if bool(self.prefill) is not bool(self.decode):
            what = f"{self.prefill} prefill workers and {self.decode} decode workers cannot serve requests"
            missing = "--prefill" if self.decode else "--decode"
            raise ConfigError(what, field=missing, hint="use at least one of each, or none")
        if self.routers is not None and not (total == 1) <= self.routers + (total == 1) <= _MAX_ROUTERS:
            raise ConfigError(f"expected 0 to {_MAX_ROUTERS} routers, got {self.routers}", field="--routers")
        if self.routers == 0 and total > 1:
            raise ConfigError(f"{total} workers need a router", field="--routers", hint="omit --routers")

    def _pool(self, role: Role, count: int) -> SimulatedPool:
        profile, own = self.profile, self.profile.limits
        given = {"max_num_seqs": own.max_num_seqs, "block_size": own.block_size, **self.engine}
        if not given.keys() & {"num_kv_blocks", "kv_cache_memory"}:
            given["num_kv_blocks"] = max(1, own.num_kv_blocks * own.block_size // given["block_size"])
        config = EngineConfig(model=profile.model.name, role=role, structured_output=False, **given)
        # A profile has no number of patches: in a budget that its largest image exceeds, they are at least four.
        patches = max(4, own.max_num_batched_tokens // max(1, own.max_image_tokens))
        block_bytes = profile.model.kv_bytes_per_token * config.block_tokens
        limits = resolve_limits(
            config,
            model_max_len=own.max_model_len,
            vocab_size=own.vocab_size,
            bytes_per_block=block_bytes,
            free_bytes=1 << 60,
            default_pipeline_depth=own.pipeline_depth,
            default_batched_tokens=own.max_num_batched_tokens,
            image_tokens=(own.max_image_tokens, patches, own.whole_images),
        )
        costs = Costs(profile, block_size=config.block_tokens)
        spare = profile.spare_processors if self.spare_processors is None else self.spare_processors
        return SimulatedPool(
            config=config,
            limits=limits,
            costs=costs,
            profile=profile.label,
            count=count,
            acceptance=self.acceptance if limits.max_drafts else 0.0,
            shares_processor=not spare,
            block_bytes=block_bytes,
        )
