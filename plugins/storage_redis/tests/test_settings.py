"""Parsing of locations, and errors of invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from fd_core.errors import ConfigError
from fd_core.kv.stores.location import parse_location

from fd_storage_redis.settings import Address, Settings, Topology
from fd_storage_redis.store import RedisStore

SECRET = "s3cr3t"


def settings(text: str, **environment: str) -> Settings:
    return Settings.of(parse_location(text), environment)


def test_url_has_user_host_and_database() -> None:
    read = settings("redis://me:p%40ss%2F@host:1234/5?namespace=n&ttl=9&max_connections=7")
    assert read.topology is Topology.SERVER
    assert read.addresses == (Address("host", 1234),)
    assert (read.credentials.user, read.credentials.password) == ("me", "p@ss/")
    assert (read.database, read.namespace, read.ttl, read.max_connections, read.tls) == (5, "n", 9, 7, False)
    assert read.shown == "redis://host:1234/5"


def test_defaults() -> None:
    read = settings("redis://host")
    assert (read.addresses[0].port, read.database, read.namespace, read.ttl) == (6379, 0, "fd", None)
    assert read.credentials.read() is None


@pytest.mark.parametrize(
    ("text", "topology", "tls", "addresses"),
    [
        ("rediss://h", Topology.SERVER, True, [Address("h", 6379)]),
        ("valkey://h:1/", Topology.SERVER, False, [Address("h", 1)]),
        ("valkeys://[::1]:2/3", Topology.SERVER, True, [Address("::1", 2)]),
        ("redis://[::1]", Topology.SERVER, False, [Address("::1", 6379)]),
        ("unix:///run/s?db=2", Topology.SOCKET, False, []),
        ("redis+unix:///run/s", Topology.SOCKET, False, []),
        ("redis+sentinel://a,b:9/1?master=m", Topology.SENTINEL, False, [Address("a", 26379), Address("b", 9)]),
        ("rediss+sentinel://a?master=m", Topology.SENTINEL, True, [Address("a", 26379)]),
        ("redis+cluster://a,b:9", Topology.CLUSTER, False, [Address("a", 6379), Address("b", 9)]),
        ("rediss+cluster://a", Topology.CLUSTER, True, [Address("a", 6379)]),
    ],
)
def test_schemes(text: str, topology: Topology, tls: bool, addresses: list[Address]) -> None:
    read = settings(text)
    assert (read.topology, read.tls, list(read.addresses)) == (topology, tls, addresses)
    assert RedisStore(parse_location(text)).name == text.partition(":")[0]


def test_passwords_in_locations_override_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_text("of the file\n")
    assert settings("redis://h", FD_REDIS_PASSWORD="e").credentials.read() == ("e",)
    assert settings("redis://me@h", FD_REDIS_PASSWORD="e").credentials.read() == ("me", "e")
    assert settings("redis://:u@h", FD_REDIS_PASSWORD="e").credentials.read() == ("u",)
    assert settings(f"redis://h?password_file={file}", FD_REDIS_PASSWORD="e").credentials.read() == ("of the file",)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("redis:127.0.0.1", "two slashes"),
        ("redis://", "host"),
        ("redis://:s3cr3t@", "host"),
        ("redis://a..b", "host"),
        ("redis://h\u00f6st", "host"),
        ("redis://[::1", "host"),
        ("redis+cluster://a,", "host"),
        ("redis://h:s3cr3t", "port"),
        ("redis://h:0", "port"),
        ("redis://h:65536", "port"),
        ("redis://:s3/cr3t@h", "@"),
        ("redis://h/s3cr3t", "database"),
        ("redis://h/-1", "database"),
        ("redis://h/99999999999999999999999", "database"),
        ("redis://a,b", "one server"),
        ("redis://me@h", "password"),
        ("redis://h?ttl=0", "ttl"),
        ("redis://h?ttl=soon", "ttl"),
        ("redis://h?ttl=1.5", "ttl"),
        ("redis://h?db=x", "db"),
        ("redis://h/1?db=1", "db"),
        ("redis://h?max_connections=1", "max_connections"),
        ("redis://h?namespace=a%20b", "namespace"),
        ("redis://h?namespace=", "namespace"),
        ("redis://h?password_file=/no/such/file", "password_file"),
        ("redis://:s3cr3t@h?password_file=/dev/null", "password_file"),
        ("redis://h?tls_ca=/dev/null", "tls_ca"),
        ("rediss://h?tls_ca=/no/such/file", "tls_ca"),
        ("rediss://h?tls_cert=/dev/null", "tls_cert"),
        ("redis://h?colour=red", "colour"),
        ("redis://h?master=m", "master"),
        ("redis+sentinel://h", "master"),
        ("redis+sentinel://h?master=m&sentinel_user=u", "sentinel_user"),
        ("redis+cluster://h/1", "database"),
        ("redis+cluster://h?db=1", "db"),
        ("unix://host/path", "path"),
        ("unix:relative", "slashes"),
        ("unix://", "path"),
    ],
)
def test_invalid_location_is_named_without_the_secret(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(text)
    message = f"{caught.value} {caught.value.hint}"
    assert named in message
    assert SECRET not in message
    assert "cr3t" not in message
    assert caught.value.field == "--kv-store"


def test_text_of_settings_contains_no_secret() -> None:
    read = settings(f"redis://me:{SECRET}@h")
    assert SECRET not in repr(read) + str(read) + repr(read.credentials)
