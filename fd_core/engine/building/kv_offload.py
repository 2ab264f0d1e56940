"""Opening KV offload: block naming, storage policy, and transfers between workers.

The scheduler decides; `fd_core.kv.tiers` and `fd_core.disagg` execute on separate threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from fd_core.config import EngineConfig, Limits
from fd_core.disagg.connectors.contract import ConnectorSettings
from fd_core.disagg.decode.receiver import Receiver
from fd_core.disagg.keys import transfer_key
from fd_core.disagg.kv_compatibility import KVCompatibility
from fd_core.disagg.prefill.sender import Sender
from fd_core.effects.port import CompletionQueue, LockedKVCache
from fd_core.engine.vectors import ONE_TOKEN
from fd_core.errors import ConfigError, ModelError
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.prefix import PrefixHasher
from fd_core.kv.stores.contract import KVStore, StoreError
from fd_core.kv.stores.envelope import HEADER_BYTES, Compression, Envelope
from fd_core.kv.stores.location import parse_location
from fd_core.kv.stores.secret import derive, load_secret
from fd_core.kv.tiers.offload import KVOffload, SealedStore
from fd_core.models.opening import open_checkpoint
from fd_core.plugins import CONNECTOR, STORE, Plugins
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.types import PrefillJob, RequestSpec

_log = logging.getLogger(__name__)

_OPEN_SECONDS: Final = 2.0
"""Timeout for the first contact with a store, in seconds; an engine starts without the store too."""
_LAYOUT: Final = "canonical-1"
"""Order of a block's payload, see `fd_core.ops.contract.KVCache.export_blocks`."""


class KVStorage(msgspec.Struct, frozen=True):
    """Storage settings and handles that exist before the scheduler and the cache."""

    hasher: PrefixHasher | None
    """None without prefix caching: blocks have no names, so none can be stored."""
    keep: OffloadSelection | None = None
    """Requests whose KV is stored outside the device; None stores none."""
    store: SealedStore | None = None
    summary: str | None = None
    """A line about the store for the start-up summary."""
    reachable: bool = True
    """True if the first contact with the store succeeded."""


def open_kv_storage(config: EngineConfig, plugins: Plugins, identity: Callable[[], str], block_bytes: int) -> KVStorage:
    """Decide how blocks are named and where their KV is stored.

    `identity` names the KV, see `kv_identity`; called only if other processes use it; `block_bytes` is the KV of one
    block. The engine starts even if the
    store is unreachable: requests then recompute their KV. Raises `ConfigError` or `PluginError` for settings that can
    never work.
    """
    if not config.enable_prefix_caching:
        if config.kv_store is not None:
            raise ConfigError(
                "a KV store requires prefix caching, which is disabled",
                field="--kv-store",
                hint="remove --no-enable-prefix-caching",
            )
        return KVStorage(None)
    if config.kv_store is None:
        # No other process reads the host tier, so block keys need no shared secret.
        hasher = PrefixHasher(block_size=config.block_tokens, identity="", secret=os.urandom(32))
        return KVStorage(hasher, kept_kv(config, stored=False))
    location = parse_location(config.kv_store)
    store = plugins.load(STORE, location.scheme)(location)
    store.envelope.require({"value_bytes": block_bytes + HEADER_BYTES}, f"the KV store {location.scheme}")
    secret = load_secret(Path(config.kv_store_secret_file) if config.kv_store_secret_file else None)
    compression: Compression = "zlib" if config.kv_store_compression == "zlib" else "none"
    reachable = True
    try:
        summary = store.open(_OPEN_SECONDS)
    except StoreError as error:
        reachable = False
        summary = f"{location.shown} is unavailable, KV is recomputed meanwhile: {error}"
        _log.warning("KV store %s", summary)
    return KVStorage(
        PrefixHasher(block_size=config.block_tokens, identity=identity(), secret=derive(secret, "block keys")),
        kept_kv(config, stored=True),
        SealedStore(store, Envelope(derive(secret, "envelope"), compression)),
        summary=summary,
        reachable=reachable,
    )


def kept_kv(config: EngineConfig, *, stored: bool) -> OffloadSelection | None:
    """Decide which requests' KV is stored outside the device; `stored`: True if the host tier is backed by a store."""
    if stored:
        return OffloadSelection(preempted=config.save_preempted_kv, finished=True, persist=True)
    return OffloadSelection(shared=False) if config.save_preempted_kv and config.host_kv_memory > 0 else None


def start_kv_offload(
    storage: KVStorage, config: EngineConfig, cache: LockedKVCache, dtype: str, queue: CompletionQueue
) -> KVOffload | None:
    """Start the threads of the opened storage and return its port; None if nothing is stored outside the device."""
    if storage.keep is None:
        return None
    return KVOffload(
        queue,
        cache,
        BlockFormat.of(cache.shape, dtype),
        host_bytes=config.host_kv_memory,
        store=storage.store,
        load_seconds=config.kv_store_timeout,
    )


def kv_identity(path: Path | None, numerics: str) -> str:
    """Return an identity of everything except the tokens that determines the bytes of a block.

    `numerics` identifies everything that computes or arranges the KV of one checkpoint differently: pack, dtype, shape.
    The number of ranks is not included: blocks outside the device contain the heads of all, as on one rank.
    """
    weights = tokenizer = "none"
    if path is not None:
        with open_checkpoint(path) as checkpoint:
            weights = checkpoint.digest
            with contextlib.suppress(ModelError):
                tokenizer = checkpoint.tokenizer.digest
    return f"{weights}/{tokenizer}/{numerics}/{_LAYOUT}/rank-0-of-1"


def prefill_request_id(lease: str) -> str:
    """Return the id of the request that computes the prefill job of a lease."""
    return f"lease-{lease}"


def prefill_request(job: PrefillJob) -> RequestSpec:
    """Return the request that computes a prefill job."""
    return RequestSpec(
        request_id=prefill_request_id(job.lease),
        prompt=tuple(job.token_ids.tolist()),
        params=ONE_TOKEN,
        priority=job.priority,
        tenant=job.tenant,
        cache_salt=job.cache_salt,
        prefill_job=job,
        adapter=job.adapter,
        images=job.images,
    )


def require_role(config: EngineConfig) -> None:
    """Raise `ConfigError` for a role that the other settings contradict."""
    if config.role != "mixed" and not config.enable_prefix_caching:
        raise ConfigError(
            f"a {config.role} worker requires prefix caching, which is disabled",
            field="--role",
            hint="remove --no-enable-prefix-caching",
        )


def open_kv_transfer(
    config: EngineConfig,
    plugins: Plugins,
    limits: Limits,
    cache: LockedKVCache,
    dtype: str,
    identity: Callable[[], str],
    queue: CompletionQueue,
) -> Receiver | Sender | None:
    """Open the transfer endpoint for the role in `config`; None for `mixed`, which has none.

    `dtype` is the pack's; `identity` names the KV, see `kv_identity`, and is called only for such an endpoint.
    Raises `ConfigError` or `PluginError`.
    """
    if config.role == "mixed":
        return None
    shape = cache.shape
    block = BlockFormat.of(shape, dtype)
    weights, _, rest = identity().partition("/")
    compatibility = KVCompatibility(
        model=hashlib.sha256(rest.encode()).hexdigest(),
        weights=weights,
        dtype=dtype if shape.dtype == "auto" else shape.dtype,
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        groups=shape.groups,
        latent=shape.latent,
        state_ranks=config.tensor_parallel_size if shape.state else 0,
    )
    envelope = Envelope(transfer_key(config.transfer_secret_file))
    make_store: Callable[[], KVStore] | None = None
    if config.kv_store is not None:
        location = parse_location(config.kv_store)
        make_store = partial(plugins.load(STORE, location.scheme), location)
    settings = ConnectorSettings(make_store, config.kv_store_timeout)
    if config.role == "decode":
        connector = plugins.load(CONNECTOR, config.kv_connector)(settings)
        return Receiver(cache, block, compatibility, envelope, connector, queue, idle_timeout=config.lease_seconds)
    return Sender(
        cache,
        block,
        compatibility,
        envelope=envelope,
        make_connector=lambda name: plugins.load(CONNECTOR, name)(settings),
        queue=queue,
        host=config.transfer_host,
        port=config.transfer_port,
        max_leases=4 * limits.max_num_seqs,
        max_tokens=limits.max_model_len,
        images=limits.max_image_tokens > 0,
    )
