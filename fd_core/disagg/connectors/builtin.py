"""The connectors that come with the core, offered through the same hook as a stranger's."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_connectors() -> list[Entry]:
    """Offer `tcp`, `shared_memory` and `kv_store`."""
    return [
        Entry("tcp", "fd_core.disagg.connectors.tcp:TCPConnector", "behind the messages, through their connection"),
        Entry(
            "shared_memory",
            "fd_core.disagg.connectors.shared_memory:SharedMemoryConnector",
            "memory that both workers map; on one host",
        ),
        Entry(
            "kv_store",
            "fd_core.disagg.connectors.kv_store:KVStoreConnector",
            "the KV store behind --kv-store, which both workers reach",
        ),
    ]
