"""The store with a healthy server."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import redis
from fd_core.kv.stores.contract import StoreError, StoreStats
from fd_core.kv.stores.location import parse_location
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import Server

from fd_storage_redis.store import RedisStore
from fd_storage_redis.wire import packed

MakeStore = Callable[[str], RedisStore]
LIMIT = 1 << 20


def test_parts_are_stored_and_returned_as_one_value(server: Server, store: MakeStore) -> None:
    kept = store(server.url)
    payload = os.urandom(700_000)
    assert kept.put([(b"a", [b"head", memoryview(payload), bytearray(b"tail")]), (b"b", [b"x"])], 5.0) == 2
    assert kept.get([b"b", b"missing", b"a"], LIMIT, 5.0) == [b"x", None, b"head" + payload + b"tail"]


def test_view_of_wider_elements_counts_its_bytes(server: Server, store: MakeStore) -> None:
    kept = store(server.url)
    wide = memoryview(os.urandom(80_000)).cast("I")
    assert kept.put([(b"a", [wide, b"."])], 5.0) == 1
    assert kept.get([b"a"], LIMIT, 5.0) == [wide.tobytes() + b"."]


def test_unix_socket_serves_as_well(server: Server, store: MakeStore) -> None:
    kept = store(server.unix_url)
    assert kept.put([(b"a", [b"1"])], 5.0) == 1
    assert kept.get([b"a"], LIMIT, 5.0) == [b"1"]


def test_keys_are_readable_and_in_the_namespace(server: Server, store: MakeStore) -> None:
    store(f"{server.url}?namespace=house").put([(b"\x00\xff", [b"1"])], 5.0)
    assert server.back_door.keys() == [b"house:00ff"]
    assert store(f"{server.url}?namespace=other").get([b"\x00\xff"], LIMIT, 5.0) == [None]


def test_longest_prefix_ends_at_a_gap_and_at_a_value_too_long(server: Server, store: MakeStore) -> None:
    kept = store(server.url)
    kept.put([(b"a", [b"1"]), (b"b", [b"22"]), (b"d", [b"4"])], 5.0)
    assert kept.longest_prefix([b"a", b"b", b"c", b"d"], LIMIT, 5.0) == 2
    assert kept.longest_prefix([b"a", b"b"], 1, 5.0) == 1
    assert kept.longest_prefix([b"a", b"b"], LIMIT, 5.0) == 2
    assert kept.longest_prefix([], LIMIT, 5.0) == 0


def test_value_over_the_limit_is_not_even_sent(server: Server, store: MakeStore) -> None:
    kept = store(server.url)
    kept.put([(b"big", [bytes(500_000)]), (b"small", [b"1"])], 5.0)
    before = server.back_door.info("stats")["total_net_output_bytes"]
    assert kept.get([b"big", b"small"], 499_999, 5.0) == [None, b"1"]
    assert server.back_door.info("stats")["total_net_output_bytes"] - before < 50_000


def test_values_of_many_windows_arrive_in_order(
    server: Server, store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fd_storage_redis.store._WINDOW", 100)
    kept = store(server.url)
    values = {bytes([n]): bytes([n]) * (n + 1) for n in range(64)}
    kept.put([(key, [value]) for key, value in values.items()], 5.0)
    assert kept.get(list(values), LIMIT, 5.0) == list(values.values())


def test_key_of_another_type_counts_as_absent(server: Server, store: MakeStore) -> None:
    kept = store(server.url)
    kept.put([(b"a", [b"1"]), (b"c", [b"3"])], 5.0)
    server.back_door.lpush("fd:" + b"b".hex(), "not a value")
    assert kept.get([b"a", b"b", b"c"], LIMIT, 5.0) == [b"1", None, b"3"]
    assert kept.longest_prefix([b"a", b"b", b"c"], LIMIT, 5.0) == 1
    assert kept.put([(b"b", [b"2"])], 5.0) == 1
    assert kept.get([b"a", b"b", b"c"], LIMIT, 5.0) == [b"1", b"2", b"3"]


def test_values_damaged_on_the_server_are_returned_unchanged(server: Server, store: MakeStore) -> None:
    kept = store(server.url)
    kept.put([(b"a", [b"whole value"])], 5.0)
    server.back_door.set("fd:" + b"a".hex(), b"whole")
    assert kept.get([b"a"], LIMIT, 5.0) == [b"whole"]


def test_delete_counts_existing_keys(server: Server, store: MakeStore) -> None:
    kept = store(server.url)
    kept.put([(b"a", [b"1"]), (b"b", [b"2"])], 5.0)
    assert kept.delete([b"a", b"missing", b"b"], 5.0) == 2
    assert kept.delete([b"a"], 5.0) == 0


def test_values_expire_only_if_asked(server: Server, store: MakeStore) -> None:
    store(f"{server.url}?ttl=100").put([(b"a", [b"1"])], 5.0)
    store(server.url).put([(b"b", [b"1"])], 5.0)
    assert 0 < server.back_door.ttl("fd:" + b"a".hex()) <= 100
    assert server.back_door.ttl("fd:" + b"b".hex()) == -1


def test_databases_are_apart(server: Server, store: MakeStore) -> None:
    store(f"redis://127.0.0.1:{server.port}/3").put([(b"a", [b"1"])], 5.0)
    assert store(f"{server.unix_url}?db=3").get([b"a"], LIMIT, 5.0) == [b"1"]
    assert store(server.url).get([b"a"], LIMIT, 5.0) == [None]


def test_stats_are_the_servers(server: Server, store: MakeStore) -> None:
    kept = store(server.url)
    kept.put([(b"a", [bytes(100_000)]), (b"b", [b"1"])], 5.0)
    stats = kept.stats(5.0)
    assert stats.values == 2
    assert stats.bytes is not None
    assert stats.bytes > 100_000
    assert stats.limit_bytes == 200 << 20


def test_open_logs_the_server_and_its_eviction_policy(server: Server, store: MakeStore) -> None:
    line = store(server.url).open(5.0)
    assert f"127.0.0.1:{server.port}" in line
    assert line.startswith(("Redis ", "Valkey "))
    assert "noeviction" in line
    assert "values expire after 60 s" in store(f"{server.url}?ttl=60").open(5.0)


def test_closed_store_rejects_calls_and_leaves_no_connection(server: Server) -> None:
    kept = RedisStore(parse_location(server.url))
    kept.open(5.0)
    kept.close()
    kept.close()
    with pytest.raises(StoreError):
        kept.get([b"a"], LIMIT, 5.0)
    assert [client["addr"] for client in server.back_door.client_list() if ":0" not in client["addr"]] == []


def test_reading_and_writing_threads_do_not_mix_answers(server: Server, store: MakeStore) -> None:
    kept = store(server.url)
    values = {bytes([n]): bytes([n]) * 20_000 for n in range(32)}
    kept.put([(key, [value]) for key, value in values.items()], 5.0)
    wrong: list[object] = []

    def read() -> None:
        wrong.extend(1 for _ in range(30) if kept.get(list(values), LIMIT, 5.0) != list(values.values()))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        assert kept.put([(key, [value]) for key, value in values.items()], 5.0) == 32
    reader.join()
    assert wrong == []


def test_empty_calls(server: Server, store: MakeStore) -> None:
    kept = store(server.url)
    assert kept.get([], LIMIT, 5.0) == []
    assert kept.put([], 5.0) == 0
    assert kept.delete([], 5.0) == 0


def test_permissions_of_the_readme_are_sufficient(server: Server, store: MakeStore) -> None:
    server.back_door.execute_command(
        "ACL SETUSER fd on >secret ~fd:* +strlen +exists +get +getrange +set +unlink +info +dbsize +select"
    )
    try:
        kept = store(f"redis://fd:secret@127.0.0.1:{server.port}/1")
        kept.open(5.0)
        assert kept.put([(b"a", [b"1"])], 5.0) == 1
        assert kept.get([b"a"], LIMIT, 5.0) == [b"1"]
        assert kept.delete([b"a"], 5.0) == 1
        assert kept.stats(5.0).values == 0
        server.back_door.execute_command("ACL SETUSER fd -info -dbsize")
        assert kept.stats(5.0) == StoreStats()
        assert "a server at" in kept.open(5.0)
    finally:
        server.back_door.execute_command("ACL DELUSER fd")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.binary(max_size=20) | st.integers(8000, 20000).map(bytes), max_size=4), max_size=5))
def test_packed_commands_match_the_client(values: list[list[bytes]]) -> None:
    client = redis.Connection()
    commands = [(b"SET", b"key", parts) for parts in values]
    expected = b"".join(b"".join(client.pack_command("SET", b"key", b"".join(parts))) for parts in values)
    assert b"".join(packed(commands)) == expected
