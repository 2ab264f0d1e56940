"""Settings of `fdcore route`, merged once: flags win over the environment, the environment over a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from fd_core.cli.settings.flags import GATEWAY_FLAGS, ROUTER_FLAGS, Given
from fd_core.cli.settings.settings import merge_layers, read_table, settings_path, take_settings
from fd_core.errors import ConfigError
from fd_core.router.config import GatewayConfig, RouterConfig, router_config
from fd_core.router.workers import Role

_FLAGS: Final = {flag.field: flag for flag in (*ROUTER_FLAGS, *GATEWAY_FLAGS)}
_OF_ROUTER: Final = frozenset(flag.field for flag in ROUTER_FLAGS)
_ALSO: Final = {
    "workers": "worker",
    "api-keys": "api-key",
    "prefills": "prefill",
    "decodes": "decode",
    "prefill-workers": "prefill",
    "decode-workers": "decode",
}
"""Other spellings of keys in a settings file, such as plurals."""
ROLE_FLAGS: Final[Mapping[Role, str]] = {"mixed": "--worker", "prefill": "--prefill", "decode": "--decode"}


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """Settings of a gateway and of its router."""

    gateway: GatewayConfig
    router: RouterConfig


def merge_route(given: Given, environment: Mapping[str, str]) -> RouteSettings:
    """Merge every source. Raises `ConfigError` naming the flag, variable or key at fault."""
    path = settings_path(given, environment)
    file, of_file = _file_layer(path) if path else ({}, RouterConfig())
    merged = merge_layers(_FLAGS, file, given, environment)
    router = msgspec.structs.replace(of_file, **{name: merged.pop(name) for name in _OF_ROUTER & merged.keys()})
    gateway = GatewayConfig(**merged)
    _check_workers(gateway)
    return RouteSettings(gateway, router)


def _check_workers(gateway: GatewayConfig) -> None:
    """Raise `ConfigError` if a worker has two roles, or if no request could be served."""
    roles: dict[str, Role] = {}
    for role, urls in gateway.by_role.items():
        for url in {url.strip().rstrip("/") for url in urls}:
            if url in roles:
                raise ConfigError(
                    f"{url} is given as a {roles[url]} worker and as a {role} worker",
                    field=ROLE_FLAGS[role],
                    hint="give each worker once, with the role that it was started with",
                )
            roles[url] = role
    if gateway.router_secret:
        return
    if not roles:
        raise ConfigError(
            "there is no worker to send requests to",
            field="--worker",
            hint="give http://HOST:PORT of each, or --router-secret-file so that they can register",
        )
    sides: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))
    for role, other in sides:
        if role in roles.values() and other not in roles.values():
            flag = ROLE_FLAGS[other]
            raise ConfigError(
                f"a {role} worker is one side of a pair, and there is no {other} worker",
                field=flag,
                hint=f"give {flag} http://HOST:PORT, or --router-secret-file so that one can register",
            )


def _file_layer(path: Path) -> tuple[dict[str, Any], RouterConfig]:
    """Read a TOML or JSON file: keys named like the flags, and those of the router itself."""
    table = read_table(path)
    layer = take_settings(table, path, (flag for flag in _FLAGS.values() if flag.field not in _OF_ROUTER), _ALSO)
    try:
        return layer, router_config(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", field="--config", hint=error.hint) from error
