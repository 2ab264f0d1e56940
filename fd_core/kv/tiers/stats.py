"""Statistics of the KV tiers."""

from __future__ import annotations

from typing import Annotated, Any, Final, get_args

import msgspec

from fd_core.kv.breaker import BreakerState
from fd_core.kv.stores.contract import FailureReason
from fd_core.types.metrics import counter, gauge, state

_FOUND: Final = "KV blocks that lookups found, by tier."
_LOADED: Final = "Tokens whose KV was copied to the device, by tier."
_BREAKER: Final = "1 at the state of the circuit breaker that guards the KV store, 0 at its other states."
_BREAKER_STATES: Final[dict[str, Any]] = {"label": "state", "values": get_args(BreakerState), "only_with": "store"}


class TierStats(msgspec.Struct, kw_only=True):
    """Counters since the start, and current gauges."""

    host_blocks: Annotated[int, gauge("kv_host_blocks", "KV blocks in the host tier.")] = 0
    host_bytes: Annotated[int, gauge("kv_host_bytes", "KV bytes in the host tier.")] = 0
    host_limit_bytes: Annotated[int, gauge("kv_host_limit_bytes", "KV bytes that the host tier may hold.")] = 0
    pending_write_bytes: Annotated[
        int,
        gauge(
            "kv_store_pending_bytes", "KV bytes waiting to be written to the store or being written.", only_with="store"
        ),
    ] = 0
    open_operations: Annotated[int, gauge("kv_operations_open", "Lookups, loads and saves in progress.")] = 0
    lookups: Annotated[int, counter("kv_lookups", "Prefixes looked up in the host tier and the store.")] = 0
    lookups_expired: Annotated[int, counter("kv_lookups_expired", "Lookups that ran out of time.")] = 0
    host_hit_blocks: Annotated[int, counter("kv_found_blocks", _FOUND, labels={"tier": "host"})] = 0
    """Leading blocks that lookups found in the host tier."""
    store_hit_blocks: Annotated[int, counter("kv_found_blocks", _FOUND, labels={"tier": "store"})] = 0
    """Blocks that lookups found after the leading ones of the host tier, in host tier and store together."""
    loads: int = 0
    load_expired: Annotated[int, counter("kv_loads_expired", "Loads of KV that ran out of time.")] = 0
    loaded_blocks_host: int = 0
    loaded_blocks_store: int = 0
    block_size: int = 0
    """Tokens of a block."""
    saves: int = 0
    saves_expired: Annotated[int, counter("kv_saves_expired", "Saves of KV that ran out of time.")] = 0
    saved_blocks: int = 0
    copy_errors: Annotated[
        int, counter("kv_copy_errors", "Copies of KV between device and host memory that failed.")
    ] = 0
    written_blocks: Annotated[
        int, counter("kv_store_written_blocks", "KV blocks written to the store.", only_with="store")
    ] = 0
    dropped_blocks: Annotated[
        int,
        counter(
            "kv_store_dropped_blocks",
            "KV blocks not written to the store: queue full, breaker open, store failed or engine stopped.",
            only_with="store",
        ),
    ] = 0
    damaged: Annotated[
        dict[str, int],
        counter("kv_store_damaged", "Stored values refused as damaged, by reason.", label="reason", only_with="store"),
    ] = {}
    store_errors: Annotated[
        dict[str, int],
        counter(
            "kv_store_failures",
            "Calls of the KV store that failed, by reason.",
            label="reason",
            old_label="trouble",
            values=tuple(reason.value for reason in FailureReason),
            only_with="store",
        ),
    ] = {}
    breaker: Annotated[BreakerState, state("kv_store_breaker", _BREAKER, labels={"way": "read"}, **_BREAKER_STATES)] = (
        "closed"
    )
    """Of lookups and loads."""
    write_breaker: Annotated[
        BreakerState, state("kv_store_breaker", _BREAKER, labels={"way": "write"}, **_BREAKER_STATES)
    ] = "closed"
    store: str | None = None
    """The store's location without secrets."""

    @property
    def loaded_tokens_host(self) -> Annotated[int, counter("kv_loaded_tokens", _LOADED, labels={"tier": "host"})]:
        """Tokens whose KV was copied from the host tier to the device."""
        return self.loaded_blocks_host * self.block_size

    @property
    def loaded_tokens_store(self) -> Annotated[int, counter("kv_loaded_tokens", _LOADED, labels={"tier": "store"})]:
        """Tokens whose KV was copied from the store to the device."""
        return self.loaded_blocks_store * self.block_size
