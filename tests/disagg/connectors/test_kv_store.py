import threading
from functools import partial
from pathlib import Path

import pytest

from fd_core.disagg.connectors.contract import ConnectorError, ConnectorSettings
from fd_core.disagg.connectors.kv_store import KVStoreConnector
from fd_core.errors import ConfigError
from fd_core.kv.stores.disk import DiskStore
from fd_core.kv.stores.location import parse_location
from fd_core.kv.stores.memory import MemoryStore
from fd_core.testing.connectors import ConnectorSuite

LEASE = "5a" * 16
LIMITS = {"window": 2, "value_bytes": 100}


def values_in(folder):
    return {found.name for found in folder.rglob("*") if found.is_file() and found.name != "usage"}


@pytest.mark.in_turn(3)
class TestThroughDisk(ConnectorSuite):
    connector = "kv_store"
    examples = 8

    @pytest.fixture
    def kv_store(self, tmp_path):
        return f"disk:{tmp_path / 'kv'}"

    def left_behind(self, kv_store):
        return values_in(Path(kv_store.removeprefix("disk:")))


@pytest.mark.soak
class TestThroughDiskAtLength(TestThroughDisk):
    examples = 25


def connector_on(folder, cls=DiskStore, timeout=1.0):
    return KVStoreConnector(ConnectorSettings(partial(cls, parse_location(f"disk:{folder}")), timeout))


@pytest.fixture
def ends(tmp_path):
    connector = connector_on(tmp_path / "kv")
    inbox = connector.open_inbox(LEASE, pieces=range(40), **LIMITS)
    return inbox, connector.open_outbox(LEASE, inbox.address, **LIMITS)


def test_connector_requires_a_store():
    with pytest.raises(ConfigError, match="needs a KV store") as caught:
        KVStoreConnector(ConnectorSettings())
    assert "--kv-store" in str(caught.value)


def test_process_local_store_is_rejected():
    with pytest.raises(ConfigError, match="memory:, which other processes cannot access"):
        KVStoreConnector(ConnectorSettings(partial(MemoryStore, parse_location("memory:"))))


def test_different_stores_are_detected_before_prefill(tmp_path):
    inbox = connector_on(tmp_path / "one").open_inbox(LEASE, pieces=range(4), **LIMITS)
    with pytest.raises(ConnectorError, match="start both workers with the same --kv-store"):
        connector_on(tmp_path / "other").open_outbox(LEASE, inbox.address, **LIMITS)


def test_unreachable_store_fails_when_lease_opens(tmp_path):
    (tmp_path / "kv").write_text("this is not a folder")
    with pytest.raises(ConnectorError, match="is not a folder"):
        connector_on(tmp_path / "kv").open_inbox(LEASE, pieces=range(4), **LIMITS)


def test_missing_value_is_an_error(ends, tmp_path):
    inbox, outbox = ends
    put = outbox.put(3, [b"value"])
    for found in (tmp_path / "kv").glob("*/*.kv"):
        found.unlink()
    with pytest.raises(ConnectorError, match="not in the KV store"):
        inbox.take(3, *put)


def test_full_store_is_an_error(tmp_path):
    class Narrow(DiskStore):
        def put(self, values, timeout):
            return super().put([each for each in values if sum(map(len, each[1])) < 100], timeout)

    connector = connector_on(tmp_path / "kv", Narrow)
    inbox = connector.open_inbox(LEASE, pieces=range(4), **LIMITS)
    with pytest.raises(ConnectorError, match="no space"):
        connector.open_outbox(LEASE, inbox.address, **LIMITS).put(0, [bytes(100)])


def test_endpoint_waiting_for_peer_times_out(tmp_path):
    waits, goes_on = threading.Event(), threading.Event()

    class Slow(DiskStore):
        def put(self, values, timeout):
            waits.set()
            assert goes_on.wait(60)
            return super().put(values, 10)

    connector = connector_on(tmp_path / "kv", Slow, timeout=0.1)
    other = threading.Thread(target=lambda: connector.open_inbox(LEASE, pieces=range(4), **LIMITS))
    other.start()
    assert waits.wait(60)
    with pytest.raises(ConnectorError, match="timed out"):
        connector.open_inbox(LEASE[::-1], pieces=range(4), **LIMITS)
    goes_on.set()
    other.join()
