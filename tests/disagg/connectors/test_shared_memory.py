import errno
import os
from pathlib import Path

import msgspec
import pytest

from fd_core.disagg.connectors import shared_memory
from fd_core.disagg.connectors.contract import ConnectorError, ConnectorSettings
from fd_core.disagg.connectors.shared_memory import SharedMemoryConnector
from fd_core.errors import ConfigError
from fd_core.testing.connectors import ConnectorSuite
from fd_core.testing.kit.processes import resource_snapshot

pytestmark = pytest.mark.slow

LEASE = "5a" * 16


@pytest.mark.in_turn(3)
class TestSharedMemoryConnector(ConnectorSuite):
    connector = "shared_memory"


@pytest.fixture
def made():
    made = shared_memory.create(LEASE, 4096)
    yield made
    made.close()


def changed(address, position, value):
    fields = msgspec.msgpack.decode(address)
    fields[position] = value
    return msgspec.msgpack.encode(fields)


def test_memory_is_shared_until_both_sides_close(made):
    found = shared_memory.attach(LEASE, made.address, 4096)
    found.bytes[7] = 42
    made.close()
    assert found.bytes[7] == 42
    found.close()


def test_segment_has_no_file_system_name(made):
    assert not list(Path("/dev/shm").glob("*fd_core*"))


@pytest.mark.parametrize("what", ["another lease", "another size"])
def test_segment_of_another_lease_is_not_opened(made, what):
    lease, size = (LEASE[::-1], 4096) if what == "another lease" else (LEASE, 8192)
    with pytest.raises(ConnectorError, match="not the shared memory of this lease"):
        shared_memory.attach(lease, made.address, size)


def test_foreign_descriptor_is_not_opened(made, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with Path("/dev/null").open("wb") as null, (tmp_path / "file").open("wb") as file:
        file.truncate(4096)
        waiting = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        for descriptor in (null.fileno(), file.fileno(), waiting):
            with pytest.raises(ConnectorError, match="not the shared memory of this lease"):
                shared_memory.attach(LEASE, changed(made.address, 3, descriptor), 4096)
        os.close(waiting)
    with pytest.raises(ConnectorError, match="cannot be opened"):
        shared_memory.attach(LEASE, changed(made.address, 3, 2**31 - 1), 4096)


def test_unsealed_memory_is_not_mapped(made):
    name = Path(f"/proc/self/fd/{msgspec.msgpack.decode(made.address)[3]}").readlink().name
    unsealed = os.memfd_create(name.removeprefix("memfd:").removesuffix(" (deleted)"), os.MFD_CLOEXEC)
    os.truncate(unsealed, 4096)
    with pytest.raises(ConnectorError, match="not sealed"):
        shared_memory.attach(LEASE, changed(made.address, 3, unsealed), 4096)
    os.close(unsealed)


def test_segment_cannot_be_truncated(made):
    descriptor = msgspec.msgpack.decode(made.address)[3]
    with pytest.raises(PermissionError):
        os.truncate(descriptor, 100)
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("position, value", [(0, "another start of it"), (1, 1)], ids=["host", "processes"])
def test_worker_on_another_host_is_detected(made, position, value):
    with pytest.raises(ConnectorError, match="runs on another host") as caught:
        shared_memory.attach(LEASE, changed(made.address, position, value), 4096)
    assert "--kv-connector tcp" in str(caught.value)


def test_failed_allocation_leaves_nothing_open(monkeypatch):
    def none_left(descriptor, start, size):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, "posix_fallocate", none_left)
    before = resource_snapshot()
    with pytest.raises(ConnectorError, match="cannot allocate 4,096 bytes of shared memory: No space left"):
        shared_memory.create(LEASE, 4096)
    assert resource_snapshot() == before


def test_oversized_lease_is_rejected_before_allocation():
    with pytest.raises(ConnectorError, match="exceeds the limit"):
        shared_memory.create(LEASE, 2**40)


def test_path_like_name_is_rejected():
    with pytest.raises(ConnectorError):
        shared_memory.create("../../etc", 4096)


def test_pieces_beyond_window_are_rejected():
    connector = SharedMemoryConnector(ConnectorSettings())
    inbox = connector.open_inbox(LEASE, pieces=range(9), window=2, value_bytes=100)
    outbox = connector.open_outbox(LEASE, inbox.address, window=2, value_bytes=100)
    there = [outbox.put(index, [b"value"]) for index in range(2)]
    with pytest.raises(ConnectorError, match="no buffer of shared memory is free"):
        outbox.put(2, [b"value"])
    inbox.done(1, there[1].reference)
    assert outbox.put(2, [b"value"]).reference == there[1].reference
    outbox.close()
    inbox.close()


def test_completed_piece_is_removed():
    connector = SharedMemoryConnector(ConnectorSettings())
    inbox = connector.open_inbox(LEASE, pieces=range(9), window=2, value_bytes=100)
    outbox = connector.open_outbox(LEASE, inbox.address, window=2, value_bytes=100)
    reference, _ = outbox.put(0, [b"value"])
    inbox.done(0, reference)
    with pytest.raises(ConnectorError, match="an empty buffer"):
        inbox.take(0, reference, ())
    outbox.close()
    inbox.close()


def test_other_platforms_are_rejected(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match="needs Linux"):
        SharedMemoryConnector(ConnectorSettings())
