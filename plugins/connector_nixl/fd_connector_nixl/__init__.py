"""Carries KV with the transfer engine NIXL; importing this imports no NIXL."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1

__version__ = "0.2.0"


@hookimpl
def fd_register_connectors() -> list[Entry]:
    """Offer `nixl`."""
    about = "the transfer engine NIXL, over TCP or RDMA, where everybody who can connect is trusted"
    return [Entry("nixl", "fd_connector_nixl.connector:NixlConnector", about)]
