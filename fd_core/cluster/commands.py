"""Command lines and secrets of the processes of a deployment."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fd_core.cluster.config import ClusterConfig, RouterGroup, WorkerGroup
from fd_core.errors import ConfigError
from fd_core.launching.contract import NODE_ADDRESS, ProcessSpec

CONTENT: Final = "FD_CONTENT_OF_"
"""Begins the name of a variable that holds what the file of a setting would hold; the rest is the setting's name."""
_PROGRAM: Final = ("-m", "fd_core.cli.serving.sealed")


@dataclass(frozen=True, slots=True)
class ClusterSecrets:
    """What the processes of one deployment know of each other and nobody else does; made anew for each."""

    router: str = field(default_factory=lambda: secrets.token_hex(24), repr=False)
    """What a router asks of whoever registers workers."""
    transfer: str = field(default_factory=lambda: secrets.token_hex(24), repr=False)
    """What seals KV on its way between workers of pairs."""
    worker_key: str = field(default_factory=lambda: secrets.token_hex(24), repr=False)
    """What workers ask of whoever sends requests, so that only routers do."""


def router_spec(
    name: str, config: ClusterConfig, port: int, own: ClusterSecrets, variables: Mapping[str, str]
) -> ProcessSpec:
    """Return the process of a router that listens on `port`. Raises `ConfigError` for a secret that is not there."""
    group = config.router_group
    arguments = (
        *("route", "--host", group.host or NODE_ADDRESS, "--port", str(port)),
        *("--admin-host", NODE_ADDRESS, "--admin-port", "0"),
        *("--drain-delay", str(config.drain_delay), "--drain-seconds", str(config.drain_seconds)),
    )
    shared = {
        f"{CONTENT}ROUTER_SECRET_FILE": own.router,
        f"{CONTENT}WORKER_KEY_FILE": own.worker_key,
        f"{CONTENT}TRANSFER_SECRET_FILE": own.transfer,
    }
    return _spec(name, group, arguments, shared, "router", variables)


def worker_spec(
    name: str, config: ClusterConfig, group_name: str, own: ClusterSecrets, variables: Mapping[str, str]
) -> ProcessSpec:
    """Return the process of a worker. Raises `ConfigError` for a secret that is not there."""
    group = config.worker_groups[group_name]
    settings = {key.replace("_", "-"): value for key, value in group.settings.items()}
    # Workers may tell routers which prefixes they hold, as those do that register themselves.
    tells_of_kv = settings.get("enable-prefix-caching", True) and settings.get("data-parallel-size", 1) == 1
    arguments = (
        *("serve", config.model, "--host", NODE_ADDRESS, "--port", "0", "--role", group.role),
        *("--drain-seconds", str(config.drain_seconds)),
        *(() if "batch-api" in group.settings else ("--no-batch-api",)),
        *(("--transfer-host", NODE_ADDRESS) if group.role == "prefill" else ()),
        *(("--kv-events",) if tells_of_kv else ()),
    )
    shared = {
        f"{CONTENT}ROUTER_SECRET_FILE": own.router,
        f"{CONTENT}TRANSFER_SECRET_FILE": own.transfer,
        "FD_API_KEY": own.worker_key,
    }
    return _spec(name, group, arguments, shared, f"workers.{group_name}", variables)


def _spec(
    name: str,
    group: RouterGroup | WorkerGroup,
    arguments: tuple[str, ...],
    shared: Mapping[str, str],
    where: str,
    variables: Mapping[str, str],
) -> ProcessSpec:
    given = {}
    for setting, variable in group.secrets.items():
        if not variables.get(variable):
            raise ConfigError(f"the variable {variable} is not set", field=f"{where}.secrets.{setting}")
        called = setting.replace("-", "_").upper()
        given[(CONTENT if called.endswith("_FILE") else "FD_") + called] = variables[variable]
    return ProcessSpec(
        name,
        (*_PROGRAM, *arguments, *_words(group.settings)),
        environment=dict(group.environment),
        secrets={**shared, **given},
        cores=group.cores,
        devices=group.devices if isinstance(group, WorkerGroup) else 0,
    )


def _words(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings as a command line has them."""
    for key, value in settings.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, list):
            yield from (f"--{name}={each}" for each in value)
        else:
            yield f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"
