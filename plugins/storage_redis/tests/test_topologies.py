"""Servers with TLS, with Sentinels and in a cluster."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import trustme
from fd_core.kv.stores.contract import FailureReason, StoreError
from servers import Server, free_port, until

from fd_storage_redis.store import RedisStore

MakeStore = Callable[[str], RedisStore]
Start = Callable[..., Server]
LIMIT = 1 << 20


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls_server(start: Start, authority: trustme.CA, tmp_path: Path) -> Server:
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    options = ["--tls-port", str(free_port()), "--tls-auth-clients", "yes"]
    options += ["--tls-ca-cert-file", str(tmp_path / "ca.pem")]
    options += ["--tls-cert-file", str(tmp_path / "cert.pem"), "--tls-key-file", str(tmp_path / "key.pem")]
    try:
        return start(*options)
    except AssertionError as ended:
        if "TLS support" not in str(ended):
            raise
        # The one in the wheel is; a distribution's is not.
        pytest.skip("this server was built without TLS")


def tls_url(server: Server, tmp_path: Path, host: str = "127.0.0.1") -> str:
    port = server.options[server.options.index("--tls-port") + 1]
    files = f"tls_ca={tmp_path}/ca.pem&tls_cert={tmp_path}/cert.pem&tls_key={tmp_path}/key.pem"
    return f"rediss://{host}:{port}?{files}"


def test_tls_with_a_private_authority(tls_server: Server, store: MakeStore, tmp_path: Path) -> None:
    kept = store(tls_url(tls_server, tmp_path))
    value = os.urandom(3_000_000)
    kept.open(5.0)
    assert kept.put([(b"a", [b"head", value])], 5.0) == 1
    assert kept.get([b"a"], 4 << 20, 5.0) == [b"head" + value]
    tls_server.restart()
    assert kept.get([b"a"], LIMIT, 5.0) == [None]
    with tls_server.frozen(), pytest.raises(StoreError) as caught:
        kept.get([b"a"], LIMIT, 0.3)
    assert caught.value.reason is FailureReason.TIMEOUT


def test_tls_rejects_unknown_authorities_and_other_names(tls_server: Server, store: MakeStore, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "stranger.pem"))
    right = tls_url(tls_server, tmp_path)
    for url in (right.replace("ca.pem", "stranger.pem"), tls_url(tls_server, tmp_path, "localhost")):
        with pytest.raises(StoreError, match=r"(?i)certificate") as caught:
            store(url).open(5.0)
        assert caught.value.reason is FailureReason.UNREACHABLE
    with pytest.raises(StoreError):
        store(right.partition("&")[0]).open(5.0)


def test_invalid_certificate_file_is_a_store_error(tls_server: Server, store: MakeStore, tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("not a certificate")
    with pytest.raises((StoreError, ssl.SSLError)) as caught:
        store(tls_url(tls_server, tmp_path)).open(5.0)
    assert isinstance(caught.value, StoreError)


def test_sentinels_resolve_the_primary_and_its_successor(start: Start, store: MakeStore, tmp_path: Path) -> None:
    quick = ("--repl-diskless-sync-delay", "0")
    first = start(*quick)
    second = start("--replicaof", "127.0.0.1", str(first.port), *quick)
    port = free_port()
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor house 127.0.0.1 {first.port} 1\n"
        "sentinel down-after-milliseconds house 1000\nsentinel failover-timeout house 5000\n"
    )
    sentinel = start(str(configuration), "--sentinel", port=port)
    # The first address is unused: the second Sentinel is queried.
    kept = store(f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/0?master=house")
    kept.open(5.0)
    assert kept.put([(b"a", [b"1"])], 5.0) == 1
    assert first.back_door.dbsize() == 1
    asked = redis.Redis(port=sentinel.port, decode_responses=True)
    until(lambda: asked.sentinel_master("house")["num-slaves"] and second.back_door.dbsize())

    def failed_over() -> bool:
        try:
            return bool(asked.execute_command("SENTINEL FAILOVER house"))
        except redis.ResponseError:  # the replica is not known to be good yet
            return False

    until(failed_over)
    until(lambda: asked.sentinel_master("house")["port"] == second.port)
    first.kill()
    asked.close()
    assert kept.put([(b"b", [b"2"])], 5.0) == 1
    assert second.back_door.exists("fd:" + b"b".hex())
    with pytest.raises(StoreError) as caught:
        store(f"redis+sentinel://127.0.0.1:{sentinel.port}?master=unknown").open(1.0)
    assert caught.value.reason is FailureReason.UNREACHABLE
    with sentinel.frozen(), pytest.raises(StoreError) as caught:
        store(f"redis+sentinel://127.0.0.1:{sentinel.port}?master=house").open(0.3)
    assert caught.value.reason in (FailureReason.TIMEOUT, FailureReason.UNREACHABLE)


@pytest.fixture
def nodes(start: Start) -> list[Server]:
    """A cluster of two, each with half of the slots."""
    servers = [start("--cluster-enabled", "yes", "--cluster-node-timeout", "2000") for _ in range(2)]
    for server, (low, high) in zip(servers, ((0, 8191), (8192, 16383)), strict=True):
        for slot_range in range(low, high + 1, 1024):
            server.back_door.execute_command("CLUSTER", "ADDSLOTS", *range(slot_range, slot_range + 1024))
    servers[1].back_door.execute_command("CLUSTER", "SET-CONFIG-EPOCH", 2)
    servers[0].back_door.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[1].port)
    for server in servers:
        until(lambda server=server: b"cluster_state:ok" in raw_info(server), 20)
    return servers


def raw_info(server: Server) -> bytes:
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.response_callbacks.clear()
        return bytes(client.execute_command("CLUSTER INFO"))


def test_cluster_spreads_values_and_follows_moved_slots(nodes: list[Server], store: MakeStore) -> None:
    first, second = nodes
    kept = store(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{first.port}")
    assert "2 servers" in kept.open(5.0)
    values = {bytes([n]): os.urandom(20_000) for n in range(32)}
    assert kept.put([(key, [value[:10], value[10:]]) for key, value in values.items()], 5.0) == 32
    assert first.back_door.dbsize() > 0
    assert second.back_door.dbsize() > 0
    assert kept.get([b"none", *values], LIMIT, 5.0) == [None, *values.values()]
    assert kept.longest_prefix([*values, b"none"], LIMIT, 5.0) == 32
    assert kept.stats(5.0).values == 32

    with pytest.raises(StoreError, match=r"redis\+cluster"):
        store(first.url).put([(key, [value]) for key, value in values.items() if slot_of(first, key) > 8191], 5.0)

    # An empty slot moves: the client is redirected and follows.
    key = next(name for n in range(1000) if slot_of(first, name := b"moved%d" % n) < 8192)
    slot = slot_of(first, key)
    owner = second.back_door.execute_command("CLUSTER MYID")
    second.back_door.execute_command(
        "CLUSTER SETSLOT", slot, "IMPORTING", first.back_door.execute_command("CLUSTER MYID")
    )
    for server in (second, first):
        server.back_door.execute_command("CLUSTER SETSLOT", slot, "NODE", owner)
    assert kept.put([(key, [b"1"])], 5.0) == 1
    assert kept.get([key], LIMIT, 5.0) == [b"1"]
    assert kept.delete([key, *values], 5.0) == 33

    second.kill()
    with pytest.raises(StoreError) as caught:
        kept.get(list(values), LIMIT, 2.0)
    assert caught.value.reason is FailureReason.UNREACHABLE
    first.kill()
    with pytest.raises(StoreError) as caught:
        kept.get([key], LIMIT, 2.0)
    assert caught.value.reason is FailureReason.UNREACHABLE


def slot_of(server: Server, key: bytes) -> int:
    return int(server.back_door.execute_command("CLUSTER KEYSLOT", "fd:" + key.hex()))


def test_server_outside_a_cluster_is_rejected(server: Server, store: MakeStore) -> None:
    with pytest.raises(StoreError) as caught:
        store(f"redis+cluster://127.0.0.1:{server.port}").open(5.0)
    assert "luster" in str(caught.value)
