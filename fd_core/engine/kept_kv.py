"""KV outside the device, joined to one engine: carries effects out and completions in, and keeps the pace.

The scheduler decides, `fd_core.kv.tiers` performs on threads of its own; what happens here takes no lock that waits for
I/O.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fd_core.config import EngineConfig
from fd_core.errors import ConfigError, ModelError
from fd_core.kv.one_at_a_time import OneAtATime
from fd_core.kv.prefix import PrefixHasher
from fd_core.kv.stores.contract import KVStore, StoreError
from fd_core.kv.stores.envelope import Compression, Envelope
from fd_core.kv.stores.location import parse_location
from fd_core.kv.stores.secret import derive, load_secret
from fd_core.kv.tiers.stats import TierStats
from fd_core.kv.tiers.tiers import KVTiers
from fd_core.models.loading.checkpoint import open_checkpoint
from fd_core.plugins import Plugins
from fd_core.scheduling.scheduler import Scheduler
from fd_core.scheduling.storage import KeepKV
from fd_core.scheduling.tradeoff import Pace
from fd_core.tracing.kv_operations import KVTrace
from fd_core.tracing.writer import TraceWriter
from fd_core.types import StepPlan

__all__ = ["KVStorage", "KeptKV", "kv_identity", "open_kv_storage"]

_log = logging.getLogger(__name__)

_OPEN_SECONDS: Final = 2.0
"""For the first contact with a store at start; an engine starts without it too."""
_FLUSH_SECONDS: Final = 3.0
"""For what waits to be written when the engine ends."""
_WAIT_SECONDS: Final = 0.005
_LEARN_FROM_TOKENS: Final = 32
"""Prefills smaller than this say more about the step than about a token."""
_SHARE: Final = 0.2
"""Weight of a step in the average cost of a token."""
_LAYOUT: Final = "canonical-1"
"""Order of a block's payload, see `fd_core.ops.contract.KVCache.export_blocks`."""


@dataclass(frozen=True, slots=True)
class KVStorage:
    """What was opened before the engine: how blocks are named, whose KV is kept, and where."""

    hasher: PrefixHasher | None
    """None without prefix caching: blocks have no names, so none can be kept."""
    keep: KeepKV | None = None
    """None keeps nothing outside the device."""
    store: KVStore | None = None
    envelope: Envelope | None = None
    about: str | None = None
    """A line about the store for the start-up summary."""
    answers: bool = True
    """Whether the store could be used at the first try."""


class KeptKV:
    """Performs the effects of one scheduler. Used from the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        tiers: KVTiers,
        store: KVStore | None,
        prefill_token: float | None = None,
        trace: KVTrace | None = None,
    ) -> None:
        """`prefill_token`: seconds that a token of a prompt took before the first request, until more is known."""
        self._scheduler = scheduler
        self._tiers = tiers
        self._store = store
        self._trace = trace
        self._prefill_token = prefill_token
        self._answered = 0.0

    def exchange(self) -> None:
        """Begin what the scheduler wants done, and tell it what is over."""
        storage = self._scheduler.storage
        if storage is None:
            return
        effects, choices = self._scheduler.take_effects(), storage.take_choices()
        if self._trace is not None:
            self._trace.decided(choices)
            self._trace.began(effects)
        if effects:
            self._tiers.perform(effects)
        if not storage.busy:
            return
        for completion in self._tiers.completed():
            if self._trace is not None:
                self._trace.ended(completion)
            self._scheduler.completed(completion)
        storage.not_stored(self._tiers.unwritten())
        rates = self._tiers.rates()
        storage.tradeoff.pace = Pace(
            self._prefill_token, rates.host_block, rates.store_block, rates.store_latency or 0.0
        )

    def wait(self) -> None:
        """Wait a moment for an operation to end; called when no step can be planned or answered."""
        storage = self._scheduler.storage
        if storage is not None and storage.busy:
            self._tiers.wait(_WAIT_SECONDS)

    def observe(self, plan: StepPlan, submitted: float, answered: float) -> None:
        """Learn from a step what a prefilled token costs. Times in seconds of one monotonic clock."""
        begun = max(submitted, self._answered)
        self._answered = answered
        tokens = plan.total_tokens
        prefill = int(plan.num_tokens[plan.num_tokens > plan.num_drafts + 1].sum())
        if prefill < max(_LEARN_FROM_TOKENS, tokens // 2):
            return
        each = (answered - begun) / tokens
        known = self._prefill_token
        self._prefill_token = each if known is None else known + _SHARE * (each - known)

    def stats(self) -> TierStats:
        """Return what the tiers did and hold."""
        return self._tiers.stats()

    def close(self) -> None:
        """Write what waits to be written, for a few seconds at most, and end the threads."""
        self._tiers.close(_FLUSH_SECONDS)
        if self._store is not None:
            self._store.close()

    @classmethod
    def join(
        cls,
        storage: KVStorage,
        scheduler: Scheduler,
        cache: OneAtATime,
        dtype: str,
        config: EngineConfig,
        prefill_token: float,
        trace: TraceWriter | None,
    ) -> KeptKV:
        """Start the tiers for an engine's scheduler and cache."""
        tiers = KVTiers(
            cache,
            dtype=dtype,
            host_bytes=config.host_kv_memory,
            store=storage.store,
            envelope=storage.envelope,
            load_seconds=config.kv_store_timeout,
        )
        return cls(scheduler, tiers, storage.store, prefill_token, None if trace is None else KVTrace(trace))


def open_kv_storage(config: EngineConfig, plugins: Plugins, identity: str) -> KVStorage:
    """Decide how blocks are named and where their KV is kept.

    `identity` is that of the KV, see `kv_identity`. A store that cannot be reached does not keep the engine from
    starting: requests compute what it would have held.
    Raises `ConfigError` or `PluginError` for settings that can never work.
    """
    if not config.enable_prefix_caching:
        if config.kv_store is not None:
            raise ConfigError(
                "a KV store finds blocks by their prefix, but prefix caching is off",
                field="--kv-store",
                hint="leave out --no-enable-prefix-caching",
            )
        return KVStorage(None)
    if config.kv_store is None:
        hasher = PrefixHasher(block_size=config.block_size, identity=identity, secret=os.urandom(32))
        kept = config.save_preempted_kv and config.host_kv_memory > 0
        return KVStorage(hasher, KeepKV() if kept else None)
    location = parse_location(config.kv_store)
    store = plugins.store_class(location.scheme)(location)
    secret = load_secret(Path(config.kv_store_secret_file) if config.kv_store_secret_file else None)
    compression: Compression = "zlib" if config.kv_store_compression == "zlib" else "none"
    answers = True
    try:
        about = store.open(_OPEN_SECONDS)
    except StoreError as error:
        answers = False
        about = f"{location.shown} cannot be used at the moment, so KV is computed meanwhile: {error}"
        _log.warning("KV store %s", about)
    return KVStorage(
        PrefixHasher(block_size=config.block_size, identity=identity, secret=derive(secret, "block keys")),
        KeepKV(preempted=config.save_preempted_kv, finished=True, persist=True),
        store,
        Envelope(derive(secret, "envelope"), compression),
        about,
        answers,
    )


def kv_identity(path: Path | None, numerics: str) -> str:
    """Name everything but the tokens that decides the bytes of a block: a change of any of it is another name.

    `numerics` tells apart whatever computes or arranges the KV of one checkpoint differently: pack, dtype, shape.
    """
    weights = tokenizer = "none"
    if path is not None:
        with open_checkpoint(path) as checkpoint:
            weights = checkpoint.digest
            with contextlib.suppress(ModelError):
                tokenizer = checkpoint.tokenizer_digest
    return f"{weights}/{tokenizer}/{numerics}/{_LAYOUT}/rank-0-of-1"
