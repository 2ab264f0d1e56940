"""KV of prompts that other workers compute, or that are computed for them, joined to one engine.

The scheduler decides, `fd_core.disagg` performs on a thread of its own; what happens here waits for nobody.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Final

from fd_core.config import EngineConfig
from fd_core.disagg.connectors.contract import Connector, ConnectorSettings
from fd_core.disagg.keys import transfer_key
from fd_core.disagg.receiver import Receiver
from fd_core.disagg.sender import Sender
from fd_core.disagg.terms import Terms
from fd_core.engine.messages import LeaseStats
from fd_core.errors import BadRequest, ConfigError
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.effects import Cancel, Fetch, Fetched, Transfer
from fd_core.kv.locked_kv_cache import LockedKVCache
from fd_core.kv.stores.contract import KVStore
from fd_core.kv.stores.envelope import Envelope
from fd_core.kv.stores.location import parse_location
from fd_core.metrics import snapshot
from fd_core.plugins import Plugins
from fd_core.scheduling.scheduler import Scheduler
from fd_core.tracing.kv_operations import KVTrace
from fd_core.tracing.writer import TraceWriter
from fd_core.types import PrefillJob, RequestSpec, SamplingParams

__all__ = ["LeasedKV", "open_leased_kv", "require_role"]

_log = logging.getLogger(__name__)

_SILENT: Final = frozenset({"transferred", "held", "aborted"})
_MOST_SAID: Final = 64
"""Reasons come from another process."""
_WAIT_SECONDS: Final = 0.002
_CLOSE_SECONDS: Final = 2.0
_NAME: Final = "lease-"
"""Begins the names of requests that are computed for other workers."""
_ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""The prompt is what counts; the token that its last position yields is nobody's."""


class LeasedKV:
    """Performs the transfers of one scheduler. Used from the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        connectors: Mapping[str, Connector],
        receiver: Receiver | None,
        sender: Sender | None,
        trace: KVTrace | None = None,
    ) -> None:
        """`connectors`: those in use, which are closed at the end; others may join them meanwhile."""
        if scheduler.transfers is None:
            raise ValueError("the scheduler knows no other workers")
        self._scheduler = scheduler
        self._transfers = scheduler.transfers
        self._connectors = connectors
        self._receiver = receiver
        self._sender = sender
        self._trace = trace
        self._stopping = False
        self._told: set[tuple[str, str]] = set()

    @property
    def port(self) -> int | None:
        """Where decode workers reach this prefill worker; None for other roles."""
        return None if self._sender is None else self._sender.port

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, by another thread, when a lease waits for a request."""
        if self._sender is not None:
            self._sender.on_order = wake

    def stop(self) -> None:
        """Take no more leases from here on."""
        self._stopping = True

    def exchange(self) -> list[str]:
        """Begin what the scheduler wants done, and tell it what is over and what is asked.

        Returns names of requests whose leases ended, to be aborted.
        """
        effects = self._transfers.take_effects()
        if effects:
            if self._trace is not None:
                self._trace.began(effects)
            self._perform(effects)
        if self._receiver is not None and self._transfers.busy:
            for fetched in self._receiver.completed():
                self._say(fetched)
                if self._trace is not None:
                    self._trace.ended(fetched)
                self._scheduler.transferred(fetched)
        if self._sender is None:
            return []
        self._sender.turned()
        for sent in self._sender.completed():
            self._scheduler.transferred(sent)
        for job in self._sender.orders():
            self._take(self._sender, job)
        return [_NAME + lease for lease in self._sender.ended()]

    def wait(self) -> None:
        """Wait a moment for a transfer to end; called when no step can be planned or answered."""
        if not self._transfers.busy:
            return
        for side in (self._receiver, self._sender):
            if side is not None:
                side.wait(_WAIT_SECONDS)

    def stats(self) -> LeaseStats:
        """Return counters and gauges."""
        sides = [side for side in (self._receiver, self._sender) if side is not None]
        return LeaseStats(
            open=sum(side.open_leases for side in sides),
            transfers=snapshot(self._transfers.counters),
            receiver=None if self._receiver is None else self._receiver.stats(),
            sender=None if self._sender is None else self._sender.stats(),
        )

    def close(self) -> None:
        """End every lease and the threads."""
        for side in (self._receiver, self._sender):
            if side is not None:
                side.close(_CLOSE_SECONDS)
        for connector in self._connectors.values():
            connector.close()

    def _perform(self, effects: list[Transfer]) -> None:
        if self._receiver is not None:
            self._receiver.perform(effect for effect in effects if isinstance(effect, Fetch | Cancel))
        if self._sender is not None:
            self._sender.perform(effect for effect in effects if not isinstance(effect, Fetch))

    def _say(self, fetched: Fetched) -> None:
        """Say for people why a prompt is computed here, once for each reason."""
        told = (fetched.outcome, fetched.reason)
        if fetched.outcome in _SILENT or told in self._told or len(self._told) >= _MOST_SAID:
            return
        self._told.add(told)
        _log.warning("a prefill worker's KV was %s, so the prompt is computed here: %s", *told)

    def _take(self, sender: Sender, job: PrefillJob) -> None:
        if self._stopping:
            sender.refuse(job.lease, "the prefill worker is shutting down")
            return
        if int(job.token_ids.max()) >= self._scheduler.limits.vocab_size:
            sender.refuse(job.lease, "the prompt has tokens that the model does not know")
            return
        spec = RequestSpec(
            request_id=_NAME + job.lease,
            prompt=tuple(job.token_ids.tolist()),
            params=_ONE_TOKEN,
            priority=job.priority,
            tenant=job.tenant,
            cache_salt=job.cache_salt,
            prefill_job=job,
        )
        try:
            self._scheduler.add(spec)
        except BadRequest as error:
            sender.refuse(job.lease, error.message)


def require_role(config: EngineConfig) -> None:
    """Raise `ConfigError` for a role that the other settings contradict."""
    if config.role != "mixed" and not config.enable_prefix_caching:
        raise ConfigError(
            f"a {config.role} worker names blocks by their prefix, but prefix caching is off",
            field="--role",
            hint="leave out --no-enable-prefix-caching",
        )


def open_leased_kv(
    config: EngineConfig,
    plugins: Plugins,
    scheduler: Scheduler,
    cache: LockedKVCache,
    dtype: str,
    identity: str,
    trace: TraceWriter | None,
) -> LeasedKV:
    """Open a prefill or decode worker's side of leases.

    `identity` is that of the KV, see `kv_offload.kv_identity`. Raises `ConfigError` or `PluginError`.
    """
    envelope = Envelope(transfer_key(config.transfer_secret_file))
    shape, block = cache.shape, BlockFormat.of(cache.shape, dtype)
    terms = Terms(
        model=hashlib.sha256(identity.encode()).hexdigest(),
        dtype=dtype,
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    settings = ConnectorSettings(_store_maker(config, plugins), config.kv_store_timeout)
    made: dict[str, Connector] = {}

    def connector(name: str) -> Connector:
        if name not in made:
            made[name] = plugins.connector_class(name)(settings)
        return made[name]

    receiver, sender = _side(config, scheduler, cache, block, terms, envelope, connector)
    return LeasedKV(scheduler, made, receiver, sender, None if trace is None else KVTrace(trace))


def _store_maker(config: EngineConfig, plugins: Plugins) -> Callable[[], KVStore] | None:
    if config.kv_store is None:
        return None
    location = parse_location(config.kv_store)
    store = plugins.store_class(location.scheme)
    return lambda: store(location)


def _side(
    config: EngineConfig,
    scheduler: Scheduler,
    cache: LockedKVCache,
    block: BlockFormat,
    terms: Terms,
    envelope: Envelope,
    connector: Callable[[str], Connector],
) -> tuple[Receiver | None, Sender | None]:
    if config.role == "decode":
        chosen = connector(config.kv_connector)
        return Receiver(cache, block, terms, envelope, chosen, silence=config.lease_seconds), None
    limits = scheduler.limits
    sender = Sender(
        cache,
        block,
        terms,
        envelope,
        connector,
        host=config.transfer_host,
        port=config.transfer_port,
        max_leases=4 * limits.max_num_seqs,
        max_tokens=limits.max_model_len,
    )
    return None, sender
