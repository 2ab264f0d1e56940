"""The scheduling policies that come with the core, offered through the same hook as a stranger's."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_schedulers() -> list[Entry]:
    """Offer `fcfs` and `priority`."""
    return [
        Entry("fcfs", "fd_core.scheduling.policies:Fcfs", "first come, first served"),
        Entry("priority", "fd_core.scheduling.policies:Priority", "lower `priority` first, then first come"),
    ]
