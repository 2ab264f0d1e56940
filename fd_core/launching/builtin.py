"""The built-in launcher, offered through the same hook as those of plugins."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_launchers() -> list[Entry]:
    """Offer `spawn`."""
    return [Entry("spawn", "fd_core.launching.spawn:SpawnLauncher", "child processes on this machine")]
