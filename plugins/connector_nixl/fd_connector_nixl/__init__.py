"""KV transfer with NIXL; importing this package does not import NIXL."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1

__version__ = "0.2.0"


@hookimpl
def fd_register_connectors() -> list[Entry]:
    """Offer `nixl`."""
    about = "the transfer engine NIXL, over TCP or RDMA, for networks in which every peer is trusted"
    return [Entry("nixl", "fd_connector_nixl.connector:NixlConnector", about)]
