"""How each process of the kit makes the connector under test."""

from __future__ import annotations

import importlib
from functools import partial

from fd_core.disagg.connectors.contract import Connector, ConnectorSettings
from fd_core.kv.stores.contract import KVStore
from fd_core.kv.stores.location import parse_location
from fd_core.testing.connectors.far_messages import Recipe


def settings_of(recipe: Recipe) -> ConnectorSettings:
    """Return the settings that an engine would make the connector from."""
    return ConnectorSettings(partial(_make_store, recipe.kv_store) if recipe.kv_store else None, recipe.timeout)


def make_connector(recipe: Recipe) -> Connector:
    """Import the class of a connector and make one."""
    module, _, name = recipe.cls.partition(":")
    made: Connector = getattr(importlib.import_module(module), name)(settings_of(recipe))
    return made


def _make_store(text: str) -> KVStore:
    from fd_core.plugins import STORE, installed_plugins

    location = parse_location(text)
    return installed_plugins().load(STORE, location.scheme)(location)
