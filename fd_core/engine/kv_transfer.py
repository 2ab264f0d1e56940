"""KV of prompts that prefill workers compute for decode workers, joined to one engine.

The scheduler decides, `fd_core.disagg` performs on a thread of its own; nothing here waits for another worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

from fd_core.config import EngineConfig, Limits
from fd_core.disagg.connectors.contract import ConnectorSettings
from fd_core.disagg.decode.receiver import Receiver
from fd_core.disagg.keys import transfer_key
from fd_core.disagg.kv_compatibility import KVCompatibility
from fd_core.disagg.prefill.sender import Sender
from fd_core.disagg.stats import ReceiverStats, SenderStats
from fd_core.engine.messages import LeaseStats
from fd_core.errors import BadRequest, ConfigError
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.effects import Fetched, GiveUp, LeaseEnded, PrefillJobArrived, Sent
from fd_core.kv.locked_kv_cache import LockedKVCache
from fd_core.kv.port import CompletionQueue
from fd_core.kv.stores.contract import KVStore
from fd_core.kv.stores.envelope import Envelope
from fd_core.kv.stores.location import parse_location
from fd_core.metrics import snapshot
from fd_core.plugins import Plugins
from fd_core.scheduling.scheduler import Scheduler
from fd_core.tracing.kv_operations import KVTrace
from fd_core.types import PrefillJob, RequestSpec, SamplingParams

__all__ = ["KVTransferExchange", "open_kv_transfer", "prefill_request", "require_role"]

_WAIT_SECONDS: Final = 0.002
_NAME: Final = "lease-"
"""Begins the names of requests that compute prefill jobs."""
_ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""The KV of the prompt is what counts; the token that its last position yields is dropped."""


def prefill_request(job: PrefillJob) -> RequestSpec:
    """Return the request that computes a prefill job."""
    return RequestSpec(
        request_id=_NAME + job.lease,
        prompt=tuple(job.token_ids.tolist()),
        params=_ONE_TOKEN,
        priority=job.priority,
        tenant=job.tenant,
        cache_salt=job.cache_salt,
        prefill_job=job,
    )


class KVTransferExchange:
    """Carries effects of one scheduler to its side of transfers, and back what comes from there. Engine's thread."""

    def __init__(self, scheduler: Scheduler, side: Receiver | Sender, trace: KVTrace | None = None) -> None:
        if scheduler.transfers is None:
            raise ValueError("the scheduler knows no other workers")
        self._scheduler = scheduler
        self._transfers = scheduler.transfers
        self._side = side
        self._trace = trace
        self._stopping = False

    @property
    def port(self) -> int | None:
        """TCP port on which the prefill worker listens for decode workers; None for decode workers."""
        return self._side.port if isinstance(self._side, Sender) else None

    def stop(self) -> None:
        """Take no more prefill jobs."""
        self._stopping = True

    def exchange(self) -> list[str]:
        """Begin the scheduler's effects, and tell the scheduler what is completed and which jobs arrived.

        Returns names of requests whose leases ended, to be aborted.
        """
        effects = self._transfers.take_effects()
        if effects:
            if self._trace is not None:
                self._trace.began(effects)
            self._side.perform(effects)
        ended = []
        for completion in self._side.completions():
            match completion:
                case PrefillJobArrived(job):
                    if (reason := self._refusal(job)) is not None:
                        self._side.perform([GiveUp(job.lease, reason, refused=True)])
                case LeaseEnded(lease):
                    ended.append(_NAME + lease)
                case Fetched() | Sent():
                    if self._trace is not None:
                        self._trace.ended(completion)
                    self._scheduler.transferred(completion)
        return ended

    def wait(self) -> None:
        """Wait a moment for a transfer to end; called when no step can be planned or answered."""
        if self._transfers.busy:
            self._side.wait(_WAIT_SECONDS)

    def stats(self) -> LeaseStats:
        """Return counters and gauges."""
        side = self._side.stats()
        return LeaseStats(
            open=side.open_leases,
            transfers=snapshot(self._transfers.counters),
            receiver=side if isinstance(side, ReceiverStats) else None,
            sender=side if isinstance(side, SenderStats) else None,
        )

    def close(self) -> None:
        """End every lease and the thread."""
        self._side.close()

    def _refusal(self, job: PrefillJob) -> str | None:
        """Have a job computed; say for people why not, if it will not be."""
        if self._stopping:
            return "the prefill worker is shutting down"
        if int(job.token_ids.max()) >= self._scheduler.limits.vocab_size:
            return "the prompt has tokens that the model does not know"
        try:
            self._scheduler.add(prefill_request(job))
        except BadRequest as error:
            return error.message
        return None


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
    identity: str,
    queue: CompletionQueue,
) -> Receiver | Sender:
    """Open the side of transfers that the role in `config` asks for, which is not `mixed`.

    `identity` is that of the KV, see `kv_offload.kv_identity`. Raises `ConfigError` or `PluginError`.
    """
    shape = cache.shape
    block = BlockFormat.of(shape, dtype)
    compatibility = KVCompatibility(
        model=hashlib.sha256(identity.encode()).hexdigest(),
        dtype=dtype,
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    envelope = Envelope(transfer_key(config.transfer_secret_file))
    settings = ConnectorSettings(_store_maker(config, plugins), config.kv_store_timeout)
    if config.role == "decode":
        connector = plugins.connector_class(config.kv_connector)(settings)
        return Receiver(cache, block, compatibility, envelope, connector, queue, silence=config.lease_seconds)
    return Sender(
        cache,
        block,
        compatibility,
        envelope,
        lambda name: plugins.connector_class(name)(settings),
        queue,
        host=config.transfer_host,
        port=config.transfer_port,
        max_leases=4 * limits.max_num_seqs,
        max_tokens=limits.max_model_len,
    )


def _store_maker(config: EngineConfig, plugins: Plugins) -> Callable[[], KVStore] | None:
    if config.kv_store is None:
        return None
    location = parse_location(config.kv_store)
    store = plugins.store_class(location.scheme)
    return lambda: store(location)
