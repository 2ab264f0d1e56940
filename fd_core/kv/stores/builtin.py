"""Built-in KV stores, registered through the same hook as those of plugins."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_stores() -> list[Entry]:
    """Register `disk` and `memory`."""
    return [
        Entry("disk", "fd_core.kv.stores.disk:DiskStore", "files in a folder; survives restarts, shared by engines"),
        Entry("memory", "fd_core.kv.stores.memory:MemoryStore", "this process's memory; lost at exit"),
    ]
