"""What a simulated engine has outside its device: production's tiers and pairs, joined as an engine joins them."""

from __future__ import annotations

from fd_core.config import EngineConfig, Limits
from fd_core.disagg.decode.receiver import Receiver
from fd_core.disagg.prefill.sender import Sender
from fd_core.effects.port import CompletionQueue, JoinedEffectPort
from fd_core.engine.building.kv_offload import kept_kv
from fd_core.ops.contract import KVCache
from fd_core.simulation.clock.timeline import Timeline
from fd_core.simulation.clock.virtual_loop import VirtualThreads
from fd_core.simulation.costs.profile_costs import Costs
from fd_core.simulation.engines.engine import OutsideParts
from fd_core.simulation.storage.storage import SharedStore, simulated_storage
from fd_core.simulation.storage.transfers import TransferNetwork, simulated_receiver, simulated_sender


def make_outside(
    timeline: Timeline,
    queue: CompletionQueue,
    cache: KVCache,
    costs: Costs,
    config: EngineConfig,
    limits: Limits,
    *,
    place: str,
    transfers: TransferNetwork,
    block_bytes: int | None = None,
    store: SharedStore | None = None,
) -> OutsideParts:
    """Return what `config` asks for, for one epoch of the engine at `place`.

    `block_bytes`: bytes of a KV block; None keeps no KV outside the device, whatever `config` says. `store` stands in
    for what `config.kv_store` names.
    """
    threads = VirtualThreads(timeline)
    keep = None
    if block_bytes is not None and config.enable_prefix_caching:
        keep = kept_kv(config, stored=store is not None)
    offload = None
    if keep is not None and block_bytes is not None:
        offload = simulated_storage(
            threads,
            queue,
            cache,
            costs,
            block_bytes=block_bytes,
            host_bytes=config.host_kv_memory,
            store=store,
            load_seconds=config.kv_store_timeout,
        )
    transfer: Receiver | Sender | None = None
    if config.role == "decode":
        transfer = simulated_receiver(threads, queue, cache, costs, transfers, place, silence=config.lease_seconds)
    elif config.role == "prefill":
        transfer = simulated_sender(threads, queue, cache, costs, transfers, place, limits)
    return OutsideParts(
        JoinedEffectPort(queue, offload, transfer),
        keep,
        transfer.port if isinstance(transfer, Sender) else None,
        threads.kill,
        threads.share,
    )
