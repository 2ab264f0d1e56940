"""Settings of servers and routers, merged once: flags win over the environment, that over a file, it over defaults."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from fd_core.cli.settings.flags import (
    CLIENT_KEY_FILE,
    CONFIG_FILE,
    ENGINE_FLAGS,
    GATEWAY_FLAGS,
    ROUTER_FLAGS,
    SERVER_FLAGS,
    Flag,
    Given,
    read_text,
)
from fd_core.cli.settings.other_servers import OLDER_VARIABLES
from fd_core.config import EngineConfig, ServerConfig
from fd_core.config.constraints import parse_switch
from fd_core.errors import ConfigError
from fd_core.router.config import GatewayConfig, RouterConfig, router_config
from fd_core.router.workers import Role

_FLAGS: Final = {flag.field: flag for flag in (*ENGINE_FLAGS, *SERVER_FLAGS)}
_SERVER_FIELDS: Final = frozenset(flag.field for flag in SERVER_FLAGS)
_EXCLUSIVE: Final = ("num_kv_blocks", "kv_cache_memory", "gpu_memory_utilization")
"""Mutually exclusive settings of one source."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Complete settings of one command."""

    engine: EngineConfig
    server: ServerConfig


def merge(
    model: str | None,
    given: Given,
    environment: Mapping[str, str],
    *,
    default_model: str | None = None,
    ask_model: Callable[[], str] | None = None,
) -> Settings:
    """Merge every source into frozen settings; `given` is the command line. Raises `ConfigError` naming the fault."""
    path = _settings_path(given, environment)
    merged = _merge_layers(_FLAGS, _file_layer(path) if path else {}, given, environment)
    model = model or environment.get("FD_MODEL") or merged.get("model") or default_model
    merged.pop("model", None)
    if not model and ask_model is not None:
        model = ask_model()
    if not model:
        raise ConfigError("no model was specified", field="MODEL", hint="for example `smollm2`")
    server = {name: value for name, value in merged.items() if name in _SERVER_FIELDS}
    engine = {name: value for name, value in merged.items() if name not in _SERVER_FIELDS}
    return _with_kv_events(Settings(EngineConfig(model=model, **engine), ServerConfig(**server)))


def client_key(given: Given, environment: Mapping[str, str]) -> str | None:
    """Return the API key that a command sends to a server, None for none. Raises `ConfigError` as `merge` does."""
    keys = merge("remote", given, environment).server.api_keys
    path = given.get(CLIENT_KEY_FILE.field) or environment.get(CLIENT_KEY_FILE.variable)
    if not keys and path:
        keys = _read_layer({CLIENT_KEY_FILE: path}, lambda flag: flag.flag)[CLIENT_KEY_FILE.field]
    return keys[0] if keys else None


def _settings_path(given: Given, environment: Mapping[str, str]) -> Path | None:
    path = given.get(CONFIG_FILE.field) or environment.get(CONFIG_FILE.variable)
    return Path(CONFIG_FILE.parse(path)) if path else None


def _merge_layers(
    flags: Mapping[str, Flag],
    file: Mapping[str, Any],
    given: Given,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Let environment and command line override a file; a setting drops conflicting ones of lower layers."""
    variables = {flag: environment[flag.variable] for flag in flags.values() if environment.get(flag.variable)}
    typed = {flag: given[name] for name, flag in flags.items() if name in given}
    merged = dict(file)
    of_environment = _read_layer(variables | _older_variables(flags, environment), lambda flag: flag.variable)
    for layer in (of_environment, _read_layer(typed, lambda flag: flag.flag)):
        if not layer.keys().isdisjoint(_EXCLUSIVE):
            merged = {name: value for name, value in merged.items() if name not in _EXCLUSIVE}
        merged |= layer
    return merged


def _with_kv_events(settings: Settings) -> Settings:
    """Let a server with a router publish the prefixes that it holds, unless this was set."""
    engine, server = settings.engine, settings.server
    if engine.kv_events is None and server.router is not None and engine.enable_prefix_caching:
        return replace(settings, engine=msgspec.structs.replace(engine, kv_events=True))
    if engine.kv_events and not engine.enable_prefix_caching:
        message = "publishing KV events requires prefix caching"
        raise ConfigError(message, field="--kv-events", hint="remove --no-enable-prefix-caching")
    if engine.kv_events and not server.router_secret:
        message = "publishing KV events requires a secret shared with the router"
        hint = "set --router-secret-file for `fdcore serve` and for the router"
        raise ConfigError(message, field="--kv-events", hint=hint)
    return settings


def _older_variables(flags: Mapping[str, Flag], environment: Mapping[str, str]) -> dict[Flag, Any]:
    older: dict[Flag, Any] = {}
    for variable, field, no, yes in OLDER_VARIABLES:
        flag = flags.get(field)
        if flag is None or not environment.get(variable) or environment.get(flag.variable):
            continue
        try:
            value = environment[variable]
            older[flag] = flag.parse(value if yes is None else yes if parse_switch(value) else no)
        except ValueError as error:
            raise ConfigError(f"{variable}: {error}", field=variable) from None
    return older


def _read_layer(raw: Mapping[Flag, Any], called: Callable[[Flag], str]) -> dict[str, Any]:
    """Parse one source's values; `called` returns the name of a flag in that source."""
    layer: dict[str, Any] = {}
    for flag, value in raw.items():
        try:
            layer[flag.field] = flag.parse(value)
        except ValueError as error:
            raise ConfigError(f"{called(flag)}: {error}", field=called(flag)) from error
    both = [called(_FLAGS[name]) for name in _EXCLUSIVE if name in layer]
    if len(both) > 1:
        message = f"{both[0]} and {both[1]} exclude each other: both set the size of the KV cache"
        raise ConfigError(message, field=both[0], hint="specify only one")
    return layer


def read_table(path: Path) -> dict[str, Any]:
    """Return the content of a settings file: TOML, or JSON by its suffix. Raises `ConfigError` naming the file."""
    kind = "JSON" if path.suffix.lower() == ".json" else "TOML"
    try:
        text = read_text(path)
    except ValueError as error:
        raise ConfigError(f"--config: {error}", field="--config") from error
    try:
        table = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the settings file {path} is not valid {kind}: {error}", field="--config") from error
    if not isinstance(table, dict):
        raise ConfigError(f"the settings file {path} does not contain a table of settings", field="--config")
    return table


def take_settings(
    table: dict[str, Any], path: Path, flags: Iterable[Flag], spellings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Take keys of `flags`, or `spellings` of them, out of a file's table; `ConfigError` for bad or repeated ones."""
    known = {flag.key: flag for flag in flags}
    raw: dict[Flag, Any] = {}
    for key in list(table):
        name = key.replace("_", "-")
        flag = known.get((spellings or {}).get(name, name))
        if flag is None:
            continue
        if flag in raw:
            raise ConfigError(f"{path}: {flag.key!r} is duplicated", field="--config")
        raw[flag] = table.pop(key)
    return _read_layer(raw, lambda flag: f"{flag.key} in {path}")


def hint_for_key(key: str, flags: Iterable[Flag]) -> str:
    """Return the replacement of a key that is not one of `flags`."""
    close = difflib.get_close_matches(key.replace("_", "-"), [flag.key for flag in flags], n=1)
    return f"did you mean {close[0]!r}?" if close else "use the names of the flags"


def _file_layer(path: Path) -> dict[str, Any]:
    table = read_table(path)
    model = table.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"model in {path}: expected text, got {model!r}", field="--config")
    layer = take_settings(table, path, _FLAGS.values())
    for key in table:
        hint = hint_for_key(key, _FLAGS.values())
        raise ConfigError(f"{path}: unknown setting {key!r}", field="--config", hint=hint)
    return layer if model is None else {**layer, "model": model}


_ROUTE_FLAGS: Final = {flag.field: flag for flag in (*ROUTER_FLAGS, *GATEWAY_FLAGS)}
_OF_ROUTER: Final = frozenset(flag.field for flag in ROUTER_FLAGS)
_ALSO: Final = {
    "workers": "worker",
    "api-keys": "api-key",
    "prefills": "prefill",
    "decodes": "decode",
    "prefill-workers": "prefill",
    "decode-workers": "decode",
}
ROLE_FLAGS: Final[Mapping[Role, str]] = {"mixed": "--worker", "prefill": "--prefill", "decode": "--decode"}


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """Settings of a gateway and of its router."""

    gateway: GatewayConfig
    router: RouterConfig


def merge_route(given: Given, environment: Mapping[str, str]) -> RouteSettings:
    """Merge every source. Raises `ConfigError` naming the flag, variable or key at fault."""
    path = _settings_path(given, environment)
    file, of_file = _route_file_layer(path) if path else ({}, RouterConfig())
    merged = _merge_layers(_ROUTE_FLAGS, file, given, environment=environment)
    router = msgspec.structs.replace(of_file, **{name: merged.pop(name) for name in _OF_ROUTER & merged.keys()})
    gateway = GatewayConfig(**merged)
    _check_workers(gateway)
    return RouteSettings(gateway, router)


def _check_workers(gateway: GatewayConfig) -> None:
    roles: dict[str, Role] = {}
    for role, urls in gateway.by_role.items():
        for url in {url.strip().rstrip("/") for url in urls}:
            if url in roles:
                message = f"{url} is listed as a {roles[url]} worker and as a {role} worker"
                hint = "list each worker once, with the role that it was started with"
                raise ConfigError(message, field=ROLE_FLAGS[role], hint=hint)
            roles[url] = role
    if gateway.router_secret:
        return
    if not roles:
        hint = "set it to http://HOST:PORT of each, or set --router-secret-file so that they can register"
        raise ConfigError("no workers are configured", field="--worker", hint=hint)
    sides: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))
    for role, other in sides:
        if role in roles.values() and other not in roles.values():
            flag = ROLE_FLAGS[other]
            message = f"a {role} worker needs a {other} worker, and none is configured"
            hint = f"set {flag} http://HOST:PORT, or --router-secret-file so that one can register"
            raise ConfigError(message, field=flag, hint=hint)


def _route_file_layer(path: Path) -> tuple[dict[str, Any], RouterConfig]:
    table = read_table(path)
    layer = take_settings(table, path, (flag for flag in _ROUTE_FLAGS.values() if flag.field not in _OF_ROUTER), _ALSO)
    try:
        return layer, router_config(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", field="--config", hint=error.hint) from error
