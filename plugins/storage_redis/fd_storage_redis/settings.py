"""Settings of a Redis location: addresses, credentials and parameters, validated before any connection."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from fd_core.errors import ConfigError
from fd_core.kv.stores.location import StoreLocation
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError

PASSWORD_VARIABLE: Final = "FD_REDIS_PASSWORD"  # noqa: S105 - the name of a variable, not a password
_FLAG: Final = "--kv-store"
_DEFAULT_PORTS: Final = {False: 6379, True: 26379}
_DEFAULT_NAMESPACE: Final = "fd"
_MAX_CONNECTIONS: Final = 4
_MOST_DATABASES: Final = 1 << 16
_LONGEST_TTL: Final = 10 * 365 * 24 * 3600
_NAME: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_ADDRESS: Final = re.compile(r"[0-9A-Fa-f:.]+(%\w+)?")
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_TLS: Final = ("tls_ca", "tls_cert", "tls_key")
_COMMON: Final = ("namespace", "ttl", "max_connections", "password_file")
_SENTINEL: Final = ("master", "sentinel_user", "sentinel_password_file")


class Topology(enum.Enum):
    """Arrangement of the servers."""

    SERVER = "server"
    SOCKET = "unix"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_EXAMPLES: Final = {
    Topology.SERVER: "redis://127.0.0.1:6379/0",
    Topology.SOCKET: "unix:///run/redis/redis.sock?db=0",
    Topology.SENTINEL: "redis+sentinel://10.0.0.1:26379,10.0.0.2:26379/0?master=NAME",
    Topology.CLUSTER: "redis+cluster://10.0.0.1:6379,10.0.0.2:6379",
}


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of one server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Credentials(CredentialProvider):
    """Credentials; a password file is read for each connection, so that passwords can be rotated."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    file: Path | None = None

    def read(self) -> tuple[str] | tuple[str, str] | None:
        """Return password, or user and password, or None without credentials. Raises `OSError` or `ValueError`."""
        password = self.password if self.file is None else self.file.read_text(encoding="utf-8").rstrip("\r\n")
        if password is None:
            return None
        return (password,) if self.user is None else (self.user, password)

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the credentials for redis-py, which calls this for each connection. Raises `AuthenticationError`."""
        try:
            read = self.read()
        except (OSError, ValueError) as error:
            raise AuthenticationError(f"{self.file} cannot be read: {type(error).__name__}") from error
        if read is None:
            raise AuthenticationError("there is no password")
        return read


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings from a location and the environment."""

    topology: Topology
    shown: str
    """The location without secrets, for messages."""
    addresses: tuple[Address, ...] = ()
    socket: str = ""
    database: int = 0
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    credentials: Credentials = Credentials()
    master: str = ""
    """Name of the primary in the Sentinels."""
    sentinel_credentials: Credentials = Credentials()
    namespace: str = _DEFAULT_NAMESPACE
    ttl: int | None = None
    """Seconds after which the server expires a value."""
    max_connections: int = _MAX_CONNECTIONS
    """Maximum connections to one server."""

    @classmethod
    def of(cls, location: StoreLocation, environment: Mapping[str, str] = os.environ) -> Settings:
        """Parse a location. Raises `ConfigError` without secrets in its message."""
        base, _, arrangement = location.scheme.partition("+")
        topology = Topology(arrangement or ("unix" if base == "unix" else "server"))
        tls = base in ("rediss", "valkeys")
        if not location.rest.startswith("//"):
            raise _no_location(f"expected two slashes after {location.scheme}:", topology)
        authority, slash, path = location.rest[2:].partition("/")
        login, _, hosts = authority.rpartition("@")
        if "@" in path:
            raise ConfigError(
                "there is a / before the @", field=_FLAG, hint="write %2F for a / in a user's name or password"
            )
        read = _Parameters(location, topology, tls)
        addresses: tuple[Address, ...] = ()
        if topology is Topology.SOCKET:
            if hosts or not path:
                raise _no_location("expected an absolute path of a socket", topology)
            database, shown = read.database(""), f"{location.scheme}:///{path}"
        else:
            addresses = tuple(_address(text, topology) for text in hosts.split(","))
            if topology is Topology.SERVER and len(addresses) != 1:
                raise _no_location("expected one address for one server", topology)
            database, shown = read.database(path), f"{location.scheme}://{hosts}{slash}{path}"
        cert, key = read.file("tls_cert"), read.file("tls_key")
        if (cert is None) != (key is None):
            raise read.wrong("tls_cert" if cert else "tls_key", "tls_cert and tls_key must be used together")
        return cls(
            topology=topology,
            shown=shown,
            addresses=addresses,
            socket=f"/{unquote(path)}",
            database=database,
            tls=tls,
            tls_ca=read.file("tls_ca"),
            tls_cert=cert,
            tls_key=key,
            credentials=_credentials(login, read, environment),
            master=read.master(),
            sentinel_credentials=read.sentinel_credentials(),
            namespace=read.namespace(),
            ttl=read.number("ttl", 1, _LONGEST_TTL),
            max_connections=read.number("max_connections", 2, 1024) or _MAX_CONNECTIONS,
        )


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Parameters of a location, checked one by one."""

    location: StoreLocation
    topology: Topology
    tls: bool

    def __post_init__(self) -> None:
        known: tuple[str, ...] = _COMMON
        known += ("db",) if self.topology is not Topology.CLUSTER else ()
        known += _SENTINEL if self.topology is Topology.SENTINEL else ()
        known += _TLS if self.tls else ()
        for name in self.location.parameters:
            if name not in known:
                raise ConfigError(
                    f"{self.location.scheme}: has no parameter {_spelled(name)}",
                    field=_FLAG,
                    hint=f"valid parameters: {', '.join(known)}",
                )

    def wrong(self, name: str, why: str) -> ConfigError:
        return ConfigError(f"parameter {name} of {self.location.scheme}: {why}", field=_FLAG)

    def text(self, name: str) -> str | None:
        return self.location.parameters.get(name)

    def number(self, name: str, least: int, most: int) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if (number := _whole(text, least, most)) is None:
            raise self.wrong(name, f"expected an integer from {least} to {most}, got {text!r:.40}")
        return number

    def database(self, path: str) -> int:
        """Return the database from the URL's path or the parameter `db`; clusters have none."""
        asked = self.number("db", 0, _MOST_DATABASES)
        if path in ("", "/"):
            return asked or 0
        if self.topology is Topology.CLUSTER:
            raise _no_location("a cluster has no numbered databases", self.topology)
        if asked is not None:
            raise self.wrong("db", "the database is in the path already")
        if (database := _whole(path, 0, _MOST_DATABASES)) is None:
            raise _no_location("expected the number of a database after the address", self.topology)
        return database

    def file(self, name: str) -> str | None:
        """Return the path of a readable file."""
        text = self.text(name)
        if text is None:
            return None
        try:
            with Path(text).open("rb"):
                return text
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise self.wrong(name, f"{text} cannot be read: {why}") from error

    def namespace(self) -> str:
        text = self.text("namespace")
        if text is not None and not _NAMESPACE.fullmatch(text):
            raise self.wrong("namespace", f"expected 1 to 64 characters of A-Z a-z 0-9 _ . : -, got {text!r:.80}")
        return text or _DEFAULT_NAMESPACE

    def master(self) -> str:
        text = self.text("master") or ""
        if self.topology is Topology.SENTINEL and not text:
            raise _no_location("parameter master is missing: the name of the primary in the Sentinels", self.topology)
        return text

    def sentinel_credentials(self) -> Credentials:
        file = self.file("sentinel_password_file")
        user = self.text("sentinel_user")
        if user is not None and file is None:
            raise self.wrong("sentinel_user", "a user needs sentinel_password_file too")
        return Credentials(user, None, Path(file) if file else None)


def _credentials(login: str, read: _Parameters, environment: Mapping[str, str]) -> Credentials:
    """Return the password of the URL, else of the file, else of the environment."""
    user, colon, password = login.partition(":")
    file = read.file("password_file")
    if colon and file:
        raise read.wrong("password_file", "the URL has a password already")
    if colon:
        return Credentials(unquote(user) or None, unquote(password))
    if file:
        return Credentials(unquote(user) or None, None, Path(file))
    inherited = environment.get(PASSWORD_VARIABLE) or None
    if user and inherited is None:
        raise ConfigError(
            "the URL has a user without a password",
            field=_FLAG,
            hint=f"add password_file=FILE or set {PASSWORD_VARIABLE}",
        )
    return Credentials(unquote(user) or None, inherited)


def _address(text: str, topology: Topology) -> Address:
    bracket = text.startswith("[")
    host, separator, port = text[1:].partition("]") if bracket else text.partition(":")
    port = port.removeprefix(":") if bracket else port
    if not (_ADDRESS.fullmatch(host) and separator if bracket else _NAME.fullmatch(host)):
        raise _no_location("an address has no host", topology)
    if not port:
        return Address(host, _DEFAULT_PORTS[topology is Topology.SENTINEL])
    if (number := _whole(port, 1, 65535)) is None:
        raise _no_location("expected a port from 1 to 65535", topology)
    return Address(host, number)


def _whole(text: str, least: int, most: int) -> int | None:
    """Parse an integer from `least` to `most`, else return None."""
    number = int(text[:20]) if text.isascii() and text.isdigit() else -1
    return number if least <= number <= most else None


def _spelled(name: str) -> str:
    """Return a parameter's name, unless it may be part of a password with a question mark."""
    return repr(name) if re.fullmatch(r"[a-z_]{1,32}", name) else "of that name"


def _no_location(message: str, topology: Topology) -> ConfigError:
    return ConfigError(message, field=_FLAG, hint=f"write {_EXAMPLES[topology]}")
