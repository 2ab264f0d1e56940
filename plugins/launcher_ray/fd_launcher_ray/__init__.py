"""Process launcher for Ray clusters; importing this package does not import Ray."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1

__version__ = "0.2.0"


@hookimpl
def fd_register_launchers() -> list[Entry]:
    """Offer `ray`."""
    return [Entry("ray", "fd_launcher_ray.launcher:RayLauncher", "the nodes of a Ray cluster")]
