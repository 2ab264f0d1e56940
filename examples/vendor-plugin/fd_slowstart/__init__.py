"""The router policy slowstart of fd_core.

Every fd_core command imports this file, so it imports nothing heavy: it only lists implementations and their modules.
"""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_router_policies() -> list[Entry]:
    """Offer `--policy slowstart`."""
    return [
        Entry(
            name="slowstart",
            target="fd_slowstart.policy:SlowStart",
            summary="the fewest requests; a new worker gets few at first",
        ),
    ]
