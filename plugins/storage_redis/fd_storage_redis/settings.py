"""Settings of a Redis location: addresses, credentials and parameters, checked before anything connects."""

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
    """User and password to log in with; a password file is read for each connection, so that passwords can change."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    file: Path | None = None

    def read(self) -> tuple[str] | tuple[str, str] | None:
        """Return password, or user and password, or None to log in as nobody. Raises `OSError` or `ValueError`."""
        password = self.password if self.file is None else self.file.read_text(encoding="utf-8").rstrip("\r\n")
        if password is None:
            return None
        return (password,) if self.user is None else (self.user, password)

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return what redis-py logs in with; it asks for each connection. Raises `AuthenticationError`."""
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
    """The location without secrets, for people."""
    addresses: tuple[Address, ...] = ()
    socket: str = ""
    database: int = 0
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    credentials: Credentials = Credentials()
    master: str = ""
    """Name under which Sentinels know the primary."""
    sentinel_credentials: Credentials = Credentials()
    namespace: str = _DEFAULT_NAMESPACE
    ttl: int | None = None
    """Seconds after which the server forgets a value."""
    max_connections: int = _MAX_CONNECTIONS
    """Most connections to one server."""

    @classmethod
    def of(cls, location: StoreLocation, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read a location. Raises `ConfigError`, whose message holds no secret."""
        base, _, arrangement = location.scheme.partition("+")
        topology = Topology(arrangement or ("unix" if base == "unix" else "server"))
        tls = base in ("rediss", "valkeys")
        if not location.rest.startswith("//"):
            raise _no_location(f"{location.scheme}: is followed by two slashes", topology)
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
                raise _no_location("a socket is an absolute path", topology)
            database, shown = read.database(""), f"{location.scheme}:///{path}"
        else:
            addresses = tuple(_address(text, topology) for text in hosts.split(","))
            if topology is Topology.SERVER and len(addresses) != 1:
                raise _no_location("one server has one address", topology)
            database, shown = read.database(path), f"{location.scheme}://{hosts}{slash}{path}"
        cert, key = read.file("tls_cert"), read.file("tls_key")
        if (cert is None) != (key is None):
            raise read.wrong("tls_cert" if cert else "tls_key", "tls_cert and tls_key go together")
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
                    hint=f"there are: {', '.join(known)}",
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
            raise self.wrong(name, f"{text!r:.40} is not a whole number from {least} to {most}")
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
            raise _no_location("what follows the address is not the number of a database", self.topology)
        return database

    def file(self, name: str) -> str | None:
        """Return the path of a file that can be read."""
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
            raise self.wrong("namespace", f"{text!r:.80} may have 1 to 64 of A-Z a-z 0-9 _ . : - only")
        return text or _DEFAULT_NAMESPACE

    def master(self) -> str:
        text = self.text("master") or ""
        if self.topology is Topology.SENTINEL and not text:
            raise _no_location(
                "parameter master is missing: the name that the Sentinels have for the primary", self.topology
            )
        return text

    def sentinel_credentials(self) -> Credentials:
        file = self.file("sentinel_password_file")
        user = self.text("sentinel_user")
        if user is not None and file is None:
            raise self.wrong("sentinel_user", "a user needs sentinel_password_file too")
        return Credentials(user, None, Path(file) if file else None)


def _credentials(login: str, read: _Parameters, environment: Mapping[str, str]) -> Credentials:
    """Take the password from the URL, else the file, else the environment."""
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
            "the URL names a user without a password",
            field=_FLAG,
            hint=f"add password_file=FILE or set {PASSWORD_VARIABLE}",
        )
    return Credentials(unquote(user) or None, inherited)


def _address(text: str, topology: Topology) -> Address:
    bracket = text.startswith("[")
    host, separator, port = text[1:].partition("]") if bracket else text.partition(":")
    port = port.removeprefix(":") if bracket else port
    if not (_ADDRESS.fullmatch(host) and separator if bracket else _NAME.fullmatch(host)):
        raise _no_location("there is an address without the name of a host", topology)
    if not port:
        return Address(host, _DEFAULT_PORTS[topology is Topology.SENTINEL])
    if (number := _whole(port, 1, 65535)) is None:
        raise _no_location("a port is a number from 1 to 65535", topology)
    return Address(host, number)


def _whole(text: str, least: int, most: int) -> int | None:
    """Return the whole number that a text is, None if the text is none from `least` to `most`."""
    number = int(text[:20]) if text.isascii() and text.isdigit() else -1
    return number if least <= number <= most else None


def _spelled(name: str) -> str:
    """Return a parameter's name, unless it may be a piece of a password with a question mark in it."""
    return repr(name) if re.fullmatch(r"[a-z_]{1,32}", name) else "of that name"


def _no_location(message: str, topology: Topology) -> ConfigError:
    return ConfigError(message, field=_FLAG, hint=f"write {_EXAMPLES[topology]}")
