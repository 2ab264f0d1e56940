"""Faults of the server: real ones wherever they can be provoked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
from fd_core.kv.stores.contract import FailureReason, StoreError
from fd_core.kv.stores.location import parse_location
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import Script, Server, free_port, until

from fd_storage_redis.store import RedisStore

MakeStore = Callable[[str], RedisStore]
Start = Callable[..., Server]
LIMIT = 1 << 20
SOON = 0.3
SECRET = "s3cr3t-passw0rd"


@contextmanager
def raises_store_error(expected: FailureReason) -> Iterator[None]:
    """Check that the block raises this error without a secret in its message.

    The kit measures how long calls take.
    """
    with pytest.raises(StoreError) as caught:
        yield
    assert caught.value.reason is expected, str(caught.value)
    assert SECRET not in str(caught.value) + repr(caught.value) + repr(caught.value.__cause__)


def test_killed_server_is_unreachable_and_serves_after_its_restart(start: Start, store: MakeStore) -> None:
    server = start()
    kept = store(server.url)
    kept.put([(b"a", [b"1"])], 30.0)
    server.kill()
    with raises_store_error(FailureReason.UNREACHABLE):
        kept.get([b"a"], LIMIT, 30.0)
    with raises_store_error(FailureReason.UNREACHABLE):
        kept.put([(b"a", [b"1"])], 30.0)
    server.start()
    assert kept.get([b"a"], LIMIT, 30.0) == [None]
    assert kept.put([(b"a", [b"1"])], 30.0) == 1


@pytest.mark.parametrize("way", ["url", "unix_url"])
def test_restart_between_two_calls_is_transparent(start: Start, store: MakeStore, way: str) -> None:
    server = start()
    kept = store(getattr(server, way))
    kept.open(30.0)
    server.restart()
    assert kept.put([(b"a", [b"1"])], 30.0) == 1
    server.restart()
    assert kept.get([b"a"], LIMIT, 30.0) == [None]


def test_connection_that_the_server_closes_is_replaced(server: Server, store: MakeStore) -> None:
    kept = store(server.url)
    kept.put([(b"a", [b"1"])], 30.0)
    server.back_door.client_kill_filter(_type="normal", skipme=True)
    assert kept.get([b"a"], LIMIT, 30.0) == [b"1"]


def test_stopped_server_times_out_and_late_replies_are_dropped(start: Start, store: MakeStore) -> None:
    server = start()
    kept = store(server.url)
    big = os.urandom(3_000_000)
    kept.put([(b"a", [b"1"]), (b"b", [b"22"])], 30.0)
    with server.frozen():
        with raises_store_error(FailureReason.TIMEOUT):
            kept.get([b"a"], LIMIT, SOON)
        with raises_store_error(FailureReason.TIMEOUT):
            kept.longest_prefix([b"a", b"b"], LIMIT, SOON)
        with raises_store_error(FailureReason.TIMEOUT):
            kept.put([(b"c", [big])] * 8, SOON)
        with raises_store_error(FailureReason.TIMEOUT):
            store(server.url).open(SOON)
    assert kept.get([b"b", b"a"], LIMIT, 30.0) == [b"22", b"1"]
    assert kept.longest_prefix([b"a"], LIMIT, 30.0) == 1


def test_slow_reply_does_not_extend_the_timeout(script: Callable[..., Script], store: MakeStore) -> None:
    kept = store(script(b":1\r\n" * 1000, pause=0.05).url)
    with raises_store_error(FailureReason.TIMEOUT):
        kept.longest_prefix([b"a"] * 1000, LIMIT, SOON)


def test_expired_deadline_is_a_timeout(server: Server, store: MakeStore) -> None:
    with raises_store_error(FailureReason.TIMEOUT):
        store(server.url).get([b"a"], LIMIT, 0.0)


def test_full_server_keeps_serving_its_values(start: Start, store: MakeStore) -> None:
    server = start("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    kept = store(server.url)
    kept.put([(b"first", [b"1"])], 30.0)
    stored = kept.put([(b"%d" % n, [os.urandom(700_000)]) for n in range(16)], 30.0)
    assert 0 < stored < 16
    with raises_store_error(FailureReason.FULL):
        kept.put([(b"more", [os.urandom(700_000)])], 30.0)
    assert kept.get([b"first", b"more"], LIMIT, 30.0) == [b"1", None]
    assert kept.delete([b"%d" % n for n in range(16)], 30.0) == stored


def test_evicting_server_accepts_everything(start: Start, store: MakeStore) -> None:
    server = start("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    kept = store(server.url)
    assert "evicts by" in kept.open(30.0)
    assert kept.put([(b"%d" % n, [os.urandom(300_000)]) for n in range(32)], 30.0) == 32


def test_replica_is_read_only(start: Start, store: MakeStore) -> None:
    primary = start("--repl-diskless-sync-delay", "0")
    store(primary.url).put([(b"a", [b"1"])], 30.0)
    replica = start("--replicaof", "127.0.0.1", str(primary.port))
    kept = store(replica.url)
    until(lambda: replica.back_door.get("fd:" + b"a".hex()), 20)
    with raises_store_error(FailureReason.READ_ONLY):
        kept.put([(b"b", [b"2"])], 30.0)
    assert kept.get([b"a"], LIMIT, 30.0) == [b"1"]


def test_missing_replicas_make_it_read_only(start: Start, store: MakeStore) -> None:
    kept = store(start("--min-replicas-to-write", "1").url)
    with raises_store_error(FailureReason.READ_ONLY):
        kept.put([(b"a", [b"1"])], 30.0)
    assert kept.get([b"a"], LIMIT, 30.0) == [None]


def test_snapshot_that_cannot_be_written_makes_it_read_only(start: Start, store: MakeStore) -> None:
    server = start("--save", "3600 1", "--unixsocket", "")
    client = redis.Redis(port=server.port)
    shutil.rmtree(server.folder)
    client.bgsave()
    until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
    with raises_store_error(FailureReason.READ_ONLY):
        store(server.url).put([(b"a", [b"1"])], 30.0)
    client.close()
    server.folder.mkdir()


def test_passwords_are_read_from_url_file_and_environment(
    start: Start, store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("--requirepass", SECRET, password=SECRET)
    address = f"127.0.0.1:{server.port}"
    file = tmp_path / "password"
    file.write_text("wrong\n")
    from_file = store(f"redis://{address}?password_file={file}")
    for wrong in (
        store(server.url),
        store(f"redis://:wrong@{address}"),
        store(f"redis://me:{SECRET}@{address}"),
        from_file,
    ):
        with raises_store_error(FailureReason.DENIED):
            wrong.get([b"a"], LIMIT, 30.0)
    file.write_text(SECRET + "\n")
    assert from_file.put([(b"a", [b"1"])], 30.0) == 1
    monkeypatch.setenv("FD_REDIS_PASSWORD", SECRET)
    for right in (store(server.url), store(f"redis://:{SECRET}@{address}"), store(f"redis://default@{address}")):
        assert right.get([b"a"], LIMIT, 30.0) == [b"1"]
        assert SECRET not in repr(right) + right.open(30.0) + repr(right.location) + repr(vars(right))
    file.unlink()
    server.restart()
    with raises_store_error(FailureReason.DENIED):
        from_file.get([b"a"], LIMIT, 30.0)


def test_read_only_user_can_read(server: Server, store: MakeStore) -> None:
    store(server.url).put([(b"a", [b"1"])], 30.0)
    server.back_door.execute_command(f"ACL SETUSER reader on >{SECRET} ~fd:* +strlen +exists +get +getrange")
    try:
        kept = store(f"redis://reader:{SECRET}@127.0.0.1:{server.port}")
        assert kept.get([b"a"], LIMIT, 30.0) == [b"1"]
        with raises_store_error(FailureReason.DENIED):
            kept.put([(b"a", [b"2"])], 30.0)
        with raises_store_error(FailureReason.DENIED):
            kept.delete([b"a"], 30.0)
        with raises_store_error(FailureReason.DENIED):
            store(f"redis://reader:{SECRET}@127.0.0.1:{server.port}?namespace=other").get([b"a"], LIMIT, 30.0)
    finally:
        server.back_door.execute_command("ACL DELUSER reader")


def test_port_without_a_listener_is_unreachable(store: MakeStore, tmp_path: Path) -> None:
    for target in (f"redis://127.0.0.1:{free_port()}", f"unix://{tmp_path}/none", "redis://no-such-host.invalid"):
        with raises_store_error(FailureReason.UNREACHABLE):
            store(target).open(30.0)


def test_missing_database_is_named(server: Server, store: MakeStore) -> None:
    with pytest.raises(StoreError, match="DB index") as caught:
        store(f"redis://127.0.0.1:{server.port}/999").open(30.0)
    assert caught.value.reason is FailureReason.OTHER


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"-LOADING Redis is loading the dataset in memory", FailureReason.UNREACHABLE),
        (b"-MASTERDOWN Link with MASTER is down", FailureReason.UNREACHABLE),
        (b"-CLUSTERDOWN The cluster is down", FailureReason.UNREACHABLE),
        (b"-BUSY Redis is busy running a script", FailureReason.TIMEOUT),
        (b"-ERR max number of clients reached", FailureReason.UNREACHABLE),
        (b"-NOAUTH Authentication required.", FailureReason.DENIED),
        (b"-DENIED Redis is running in protected mode", FailureReason.DENIED),
        (b"-ERR something else", FailureReason.OTHER),
        (b"-\xff\xfe", FailureReason.OTHER),
        (b"+what", FailureReason.MALFORMED),
        (b"*1\r\n:1", FailureReason.MALFORMED),
        (b"$-1", FailureReason.MALFORMED),
        (b"not redis at all", FailureReason.OTHER),
    ],
)
def test_reply_of_the_server_determines_the_error(
    script: Callable[..., Script], store: MakeStore, answer: bytes, expected: FailureReason
) -> None:
    kept = store(script(answer + b"\r\n").url)
    with raises_store_error(expected):
        kept.longest_prefix([b"a"], LIMIT, 30.0)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(min_size=1, max_size=40)
    # Complete but invalid replies to a cluster client.
    | st.sampled_from([b"*0\r\n", b"*1\r\n:1\r\n", b"*1\r\n*2\r\n:0\r\n:1\r\n", b"*1\r\n*3\r\n:0\r\n:9\r\n*0\r\n"])
)
def test_garbage_raises_store_errors_only(script: Callable[..., Script], answer: bytes) -> None:
    one = script(answer)
    address = one.url.removeprefix("redis")
    try:
        for target in (one.url, f"redis+sentinel{address}?master=m", f"redis+cluster{address}"):
            kept = RedisStore(parse_location(target))
            for call in (
                lambda kept=kept: kept.get([b"a"], LIMIT, 0.02),
                lambda kept=kept: kept.put([(b"a", [b"1"])], 0.02),
                lambda kept=kept: kept.stats(0.02),
            ):
                with suppress(StoreError):
                    call()
            kept.close()
    finally:
        one.close()
