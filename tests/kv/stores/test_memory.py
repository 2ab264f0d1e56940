import pytest

from fd_core.errors import ConfigError
from fd_core.kv.stores.location import parse_location
from fd_core.kv.stores.memory import MemoryStore
from fd_core.testing.stores import BackDoor, StoreSuite, closed


class MemoryDoor(BackDoor):
    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def read(self, key):
        return self._store._values.get(key)

    def write(self, key, value):
        self.delete(key)
        self._store._values[key] = value
        self._store._bytes += len(value)

    def delete(self, key):
        self._store._bytes -= len(self._store._values.pop(key, b""))


@pytest.mark.in_turn(3)
class TestMemoryStore(StoreSuite):
    persistence = closed("memory is freed with the store")
    sharing = closed("each store has separate memory")

    @pytest.fixture
    def location(self):
        return "memory:"

    @pytest.fixture
    def back_door(self, store):
        return MemoryDoor(store)


def test_memory_location_takes_no_path():
    with pytest.raises(ConfigError, match="memory:/x has a path"):
        MemoryStore(parse_location("memory:/x"))


def test_values_are_returned_without_copying():
    store = MemoryStore(parse_location("memory:"))
    store.put([(b"k", [b"a" * 100])], 1)
    assert store.get([b"k"], 100, 1)[0] is store.get([b"k"], 100, 1)[0]
