"""The file of a deployment, read and checked, and the command lines and secrets of its processes.

Every error names the field as it is written in the file, such as `workers.decode.count`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar

import msgspec

from fd_core.config.constraints import CheckedStruct, Range, make_settings
from fd_core.errors import ConfigError
from fd_core.launching.contract import NODE_ADDRESS, ProcessSpec
from fd_core.router.workers import ROLES, Role

_S = TypeVar("_S", bound=CheckedStruct)
_DAY: Final = 86400
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS: Final = {
    **dict.fromkeys(("host", "port", "admin-host", "admin-port"), "the deployment chooses it"),
    **dict.fromkeys(("router", "advertise-url", "worker", "prefill", "decode"), "the deployment registers its workers"),
    **dict.fromkeys(
        ("router-secret-file", "transfer-secret-file", "worker-key-file", "transfer-host", "transfer-port"),
        "the deployment generates it",
    ),
    **dict.fromkeys(("role", "model"), "it is a field of the file itself"),
    **dict.fromkeys(("drain-seconds", "drain-delay"), "it is a field of the file itself, for all processes"),
    "config": "settings are in this file",
    "kv-events": "the deployment decides it",
    **dict.fromkeys(
        ("ssl-certfile", "ssl-keyfile", "ssl-ca-certs", "worker-ca-certs", "router-ca-certs"),
        "TLS inside a deployment is not supported yet: terminate TLS in front of its routers",
    ),
}
"""Settings that are not allowed in groups, with the reason."""
CONTENT: Final = "FD_CONTENT_OF_"
"""Prefix of a variable that holds the content of a setting's file; the rest of the name is the setting's name."""
_PROGRAM: Final = ("-m", "fd_core.cli.serving.sealed")


class _Group(CheckedStruct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """Flags without dashes and their values, such as `{max-num-seqs = 64}`."""
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    """Environment variables of the processes."""
    secrets: dict[str, str] = msgspec.field(default_factory=dict)
    """Settings to the names of the variables that hold their values where the command runs; such a value is in no
    command line and in no log. For a setting that names a file, the variable holds what would be in the file."""
    cores: Annotated[int, Range(0, 4096)] = 1
    """Processors reserved for each process; 0 for any share of the available ones."""


class RouterGroup(_Group, frozen=True, kw_only=True):
    """`[router]`: the endpoints of clients."""

    count: Annotated[int, Range(1, 1000)] = 1
    """Number of routers."""
    host: str | None = None
    """Address on which routers listen; by default their node's own address, which is loopback on one machine."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port of the first router; each further one has the next port. 0 takes any."""
    cores: Annotated[int, Range(0, 4096)] = 0


class WorkerGroup(_Group, frozen=True, kw_only=True):
    """`[workers.NAME]`: like workers of one role."""

    role: str = "mixed"
    """`mixed`, `prefill` or `decode`."""
    count: Annotated[int, Range(1, 10_000)] | None = None
    """Number of workers; or `min` and `max`."""
    min: Annotated[int, Range(1, 10_000)] | None = None
    """Fewest workers, which is the number at the start."""
    max: Annotated[int, Range(1, 10_000)] | None = None
    """Most workers."""
    devices: Annotated[int, Range(0, 64)] = 0
    """Accelerators reserved for each process, and the only ones that it sees."""
    policy: str = "load"
    """Policy that chooses the number of workers between `min` and `max`: `load` or a plugin's scaling policy."""
    scaling: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options of the policy."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most workers."""
        fewest = self.count or self.min or 1
        return fewest, self.count or self.max or fewest


class ClusterConfig(CheckedStruct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """The file itself."""

    model: str
    """Model of every worker: `smollm2`, a folder, a .gguf file or a Hugging Face name, the same on all nodes."""
    workers: dict[str, Any]
    """`[workers.NAME]`, one for each group."""
    router: dict[str, Any] = msgspec.field(default_factory=dict)
    """`[router]`."""
    launcher: str = "spawn"
    """Launcher of the processes: `spawn` on this machine, or a plugin's launcher such as `ray`."""
    start_seconds: Annotated[float, Range(0, _DAY, above=True)] = 600.0
    """Timeout for a process to become ready, in seconds."""
    unhealthy_seconds: Annotated[float, Range(0, _DAY, above=True)] = 60.0
    """Time that a worker may fail health checks before it is replaced, in seconds; it restarts its engine by itself."""
    drain_seconds: Annotated[float, Range(0, _DAY)] = 30.0
    """Time that running requests may continue in a process that drains, in seconds."""
    drain_delay: Annotated[float, Range(0, _DAY)] = 0.0
    """Time that a draining router still accepts requests while its /ready reports the drain, in seconds."""
    max_failures: Annotated[int, Range(1, 1000)] = 5
    """Failed starts of a group in a row after which it is given up."""
    host: str = "127.0.0.1"
    """Address on which the command itself serves /health, /ready, /metrics and /status.json."""
    port: Annotated[int, Range(0, 65535)] = 8070
    """Port of that address."""

    @property
    def router_group(self) -> RouterGroup:
        """`[router]`, checked by `cluster_config`."""
        return _made(RouterGroup, self.router, "router")

    @property
    def worker_groups(self) -> dict[str, WorkerGroup]:
        """`[workers.NAME]` by name, checked by `cluster_config`."""
        return {name: _made(WorkerGroup, table, f"workers.{name}") for name, table in self.workers.items()}


def cluster_config(table: Mapping[str, Any]) -> ClusterConfig:
    """Return the deployment of a file; `ConfigError` names the field. Values of `settings` are checked elsewhere."""
    for key in ("model", "workers"):
        if key not in table:
            hint = 'for example model = "smollm2"' if key == "model" else "for example [workers.mixed] with count = 2"
            raise ConfigError("required field", field=key, hint=hint)
    config = _made(ClusterConfig, table, "")
    router = config.router_group
    _check_group(router, "router")
    if router.port + router.count - 1 > 65535:
        raise ConfigError(
            f"{router.count} routers starting at port {router.port} exceed port 65535", field="router.port"
        )
    roles: dict[Role, str] = {}
    if not config.workers:
        raise ConfigError("no workers are configured", field="workers", hint="for example [workers.mixed]")
    for name, group in config.worker_groups.items():
        where = f"workers.{name}"
        if not _NAME.fullmatch(name) or name == "router":
            hint = "lower case letters, digits and -, starting with a letter; `router` is reserved"
            raise ConfigError(f"{name!r} is not a valid group name", field=where, hint=hint)
        _check_group(group, where)
        _check_count(group, where)
        if group.role not in ROLES:
            raise ConfigError(f"expected one of {', '.join(ROLES)}, got {group.role!r}", field=f"{where}.role")
        roles[group.role] = where
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if role in roles and other not in roles:
            message = f"{roles[role]} are {role} workers, which need {other} workers"
            raise ConfigError(message, field="workers", hint=f'add a group with role = "{other}"')
    return config


def _check_group(group: RouterGroup | WorkerGroup, where: str) -> None:
    for key in group.settings:
        name = key.replace("_", "-")
        if name in _OURS:
            raise ConfigError(f"{key!r} is not allowed here: {_OURS[name]}", field=f"{where}.settings")
        hint = f'set {name} = "NAME_OF_A_VARIABLE" in [{where}.secrets]'
        if name in ("api-key", "ssl-keyfile-password"):
            raise ConfigError(f"{key!r} would be visible in a command line", field=f"{where}.settings", hint=hint)
        if name == "kv-store" and "@" in str(group.settings[key]):
            raise ConfigError("a password would be visible in a command line", field=f"{where}.settings", hint=hint)
    for key, variable in group.secrets.items():
        if why := _OURS.get(key.replace("_", "-")):
            raise ConfigError(f"{key!r} is not allowed here: {why}", field=f"{where}.secrets")
        if key in group.settings:
            raise ConfigError(f"{key!r} is set in both settings and secrets", field=f"{where}.secrets")
        if not isinstance(variable, str) or not _VARIABLE.fullmatch(variable):
            # The value may be the secret itself, so it is not shown.
            hint = "use the name of the variable that holds the secret, never the secret itself"
            raise ConfigError(f"{key} must be the name of a variable", field=f"{where}.secrets", hint=hint)
    for key, value in group.environment.items():
        if not _VARIABLE.fullmatch(key) or not isinstance(value, str):
            raise ConfigError(f"{key!r} is not an environment variable with a text value", field=f"{where}.environment")


def _check_count(group: WorkerGroup, where: str) -> None:
    if group.count is not None and (group.min is not None or group.max is not None):
        field = "min" if group.min is not None else "max"
        raise ConfigError(f"count and {field} exclude each other", field=f"{where}.{field}", hint="specify only one")
    if group.max is None and group.min is not None:
        raise ConfigError("min requires max", field=f"{where}.max", hint="or specify only count")
    fewest, most = group.bounds
    if fewest > most:
        raise ConfigError(f"min={fewest} exceeds max={most}", field=f"{where}.min")
    if group.scaling and group.max is None:
        raise ConfigError(
            "scaling requires a variable number of workers", field=f"{where}.scaling", hint="set min and max"
        )


def _made(kind: type[_S], table: Any, where: str) -> _S:
    if not isinstance(table, Mapping):
        raise ConfigError(f"expected a table, got {table!r:.60}", field=where, hint=f"write [{where}]")
    fields = {name.replace("-", "_"): value for name, value in table.items()}
    try:
        return make_settings(kind, fields)
    except ConfigError as error:
        field = f"{where}.{error.field}" if where and error.field else error.field or where
        message = error.message.removeprefix(f"{error.field}: ")
        raise ConfigError(message, field=field, hint=error.hint) from None


@dataclass(frozen=True, slots=True)
class ClusterSecrets:
    """Secrets shared by the processes of one deployment only; generated anew for each."""

    router: str = field(default_factory=lambda: secrets.token_hex(24), repr=False)
    transfer: str = field(default_factory=lambda: secrets.token_hex(24), repr=False)
    """Secret that seals KV transfers between workers of pairs."""
    worker_key: str = field(default_factory=lambda: secrets.token_hex(24), repr=False)
    """Key that workers require of clients, so that only routers can send requests."""


def router_spec(
    name: str, config: ClusterConfig, port: int, own: ClusterSecrets, variables: Mapping[str, str]
) -> ProcessSpec:
    """Return the process of a router that listens on `port`. Raises `ConfigError` for a missing secret."""
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
    return _spec(name, group, arguments, shared=shared, where="router", variables=variables)


def worker_spec(
    name: str, config: ClusterConfig, group_name: str, own: ClusterSecrets, variables: Mapping[str, str]
) -> ProcessSpec:
    """Return the process of a worker. Raises `ConfigError` for a missing secret."""
    group = config.worker_groups[group_name]
    settings = {key.replace("_", "-"): value for key, value in group.settings.items()}
    # Workers may publish the prefixes that they hold, as workers do that register themselves.
    reports_kv = settings.get("enable-prefix-caching", True) and settings.get("data-parallel-size", 1) == 1
    arguments = (
        *("serve", config.model, "--host", NODE_ADDRESS, "--port", "0", "--role", group.role),
        *("--drain-seconds", str(config.drain_seconds)),
        *(() if "batch-api" in group.settings else ("--no-batch-api",)),
        *(("--transfer-host", NODE_ADDRESS) if group.role == "prefill" else ()),
        *(("--kv-events",) if reports_kv else ()),
    )
    shared = {
        f"{CONTENT}ROUTER_SECRET_FILE": own.router,
        f"{CONTENT}TRANSFER_SECRET_FILE": own.transfer,
        "FD_API_KEY": own.worker_key,
    }
    return _spec(name, group, arguments, shared=shared, where=f"workers.{group_name}", variables=variables)


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
    for key, value in settings.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, list):
            yield from (f"--{name}={each}" for each in value)
        else:
            yield f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"
