"""The scaling policy that comes with the core, offered through the same hook as those of plugins."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_scaling_policies() -> list[Entry]:
    """Offer `load`."""
    return [Entry("load", "fd_core.cluster.scaling:LoadPolicy", "queue, KV in use and time to the first token")]
