"""KV of prompts that prefill workers compute for decode workers, joined to one engine.

The scheduler decides, `fd_core.disagg` performs on a thread of its own; nothing here waits for another worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

from fd_core.config import EngineConfig, Limits
from fd_core.disagg.connectors.contract import ConnectorSettings
from fd_core.disagg.decode.receiver import Receiver
from fd_core.disagg.keys import transfer_key
from fd_core.disagg.kv_compatibility import KVCompatibility
from fd_core.disagg.prefill.sender import Sender
from fd_core.effects.port import CompletionQueue, LockedKVCache
from fd_core.engine.vectors import ONE_TOKEN
from fd_core.errors import ConfigError
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.contract import KVStore
from fd_core.kv.stores.envelope import Envelope
from fd_core.kv.stores.location import parse_location
from fd_core.plugins import CONNECTOR, STORE, Plugins
from fd_core.types import PrefillJob, RequestSpec


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
    )


def require_role(config: EngineConfig) -> None:
    """Raise `ConfigError` for a role that the other settings contradict."""
    if config.role != "mixed" and not config.enable_prefix_caching:
        raise ConfigError(
            f"a {config.role} worker names blocks by their prefix, but prefix caching is off",
            field="--role",
            hint="leave out --no-enable-prefix-caching",
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
    """Open the side of transfers that the role in `config` asks for; None for `mixed`, which has none.

    `dtype` is the pack's; `identity` names the KV, see `kv_offload.kv_identity`, and is called only for such a side.
    Raises `ConfigError` or `PluginError`.
    """
    if config.role == "mixed":
        return None
    shape = cache.shape
    block = BlockFormat.of(shape, dtype)
    compatibility = KVCompatibility(
        model=hashlib.sha256(identity().encode()).hexdigest(),
        dtype="int8" if shape.quantized else dtype,
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    envelope = Envelope(transfer_key(config.transfer_secret_file))
    make_store: Callable[[], KVStore] | None = None
    if config.kv_store is not None:
        location = parse_location(config.kv_store)
        make_store = partial(plugins.load(STORE, location.scheme), location)
    settings = ConnectorSettings(make_store, config.kv_store_timeout)
    if config.role == "decode":
        connector = plugins.load(CONNECTOR, config.kv_connector)(settings)
        return Receiver(cache, block, compatibility, envelope, connector, queue, silence=config.lease_seconds)
    return Sender(
        cache,
        block,
        compatibility,
        envelope,
        lambda name: plugins.load(CONNECTOR, name)(settings),
        queue,
        host=config.transfer_host,
        port=config.transfer_port,
        max_leases=4 * limits.max_num_seqs,
        max_tokens=limits.max_model_len,
    )
