"""The connector `nixl`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fd_core.disagg.connectors.contract import Connector, ConnectorError, ConnectorSettings, KVInbox, KVOutbox
from fd_core.errors import PluginError

from fd_connector_nixl.inbox import NixlInbox
from fd_connector_nixl.layout import Layout
from fd_connector_nixl.library import load_library
from fd_connector_nixl.memory import MEMORY
from fd_connector_nixl.outbox import NixlOutbox
from fd_connector_nixl.settings import read_settings
from fd_connector_nixl.station import Station

_log = logging.getLogger(__name__)

_MOST_HELD_BACK: Final = 1 / 4
"""Share of the allowed memory that may be held back; beyond it, the connector continues with a new station."""


class NixlConnector(Connector):
    """For workers that reach each other where nobody else does: NIXL checks nothing where it writes to."""

    name = "nixl"

    def __init__(self, settings: ConnectorSettings) -> None:
        """Start NIXL, so that whoever names this connector learns at once if it cannot.

        Raises `ConfigError` for the environment's settings, `PluginError` if NIXL is missing or does not start.
        """
        super().__init__(settings)
        self._nixl_settings = read_settings(os.environ)
        self._library = load_library()
        self._lock = threading.Lock()
        self._closed = False
        self._station = self._start()
        self._retired: list[Station] = []
        _log.warning(
            "NIXL listens on the devices %s and checks nobody: whoever connects can alter this process's memory",
            self._nixl_settings.devices,
        )

    def open_inbox(self, lease: str, *, pieces: range, window: int, value_bytes: int) -> KVInbox:
        """Return an inbox with memory for `window` values."""
        with self._entered() as station:
            return NixlInbox(station, lease, pieces, Layout(window, value_bytes), self.settings.timeout)

    def open_outbox(self, lease: str, address: bytes, *, window: int, value_bytes: int) -> KVOutbox:
        """Return an outbox that is connected to the inbox's agent and can reach its memory."""
        with self._entered() as station:
            return NixlOutbox(station, lease, address, Layout(window, value_bytes), self.settings.timeout)

    def close(self) -> None:
        """Close the agents."""
        with self._lock:
            self._closed = True
            stations = [self._station, *self._retired]
        for station in stations:
            station.close()

    def _start(self) -> Station:
        return Station(self._library, self._nixl_settings, MEMORY)

    @contextmanager
    def _entered(self) -> Iterator[Station]:
        """Enter the station for an end that is opened; leave it if that fails."""
        with self._lock:
            if self._closed:
                raise ConnectorError("the connector nixl is closed")
            if self._station.held_back > _MOST_HELD_BACK * self._nixl_settings.memory:
                self._renew()
            station = self._station
            station.enter()
        try:
            yield station
        except ConnectorError:
            station.leave()
            raise

    def _renew(self) -> None:
        """Start another station. The old one closes with its last lease, which frees the memory that it held back."""
        try:
            station = self._start()
        except PluginError as error:
            raise ConnectorError(f"NIXL cannot start again: {error.message}") from error
        old, self._station = self._station, station
        self._retired = [one for one in self._retired if not one.closed]
        self._retired.append(old)
        old.retire()
