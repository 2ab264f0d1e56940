"""The backend for MetaX GPUs; importing this imports no framework."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1

__version__ = "0.2.0"


@hookimpl
def fd_register_backends() -> list[Entry]:
    """Offer `metax`."""
    return [Entry("metax", "fd_metax.backend:MetaxBackend", "MetaX GPUs, through Paddle; else emulated")]
