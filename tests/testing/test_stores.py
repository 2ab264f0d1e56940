"""The kit detects faults: each of these stores breaks one promise, and the named case or test fails."""

import inspect
import logging
import os
from contextlib import suppress
from types import SimpleNamespace
from typing import get_args

import pytest

from fd_core.config.envelope import OperatingEnvelope
from fd_core.errors import ConfigError
from fd_core.kv.stores.contract import Bytes, KVStore
from fd_core.kv.stores.disk import DiskStore
from fd_core.kv.stores.location import parse_location
from fd_core.kv.stores.memory import MemoryStore
from fd_core.testing.stores import StoreSuite, closed
from fd_core.testing.stores.cases import STORES, StorePlace
from fd_core.testing.stores.day import SERVERS
from fd_core.testing.stores.values import CONTENTS
from tests.kv.stores.test_disk import DiskDoor
from tests.kv.stores.test_memory import MemoryDoor
from tests.testing.right.keeping import CompressedDoor, CompressingStore
from tests.testing.witnesses import check_of
from tests.testing.wrong.keeping import DAY, FEW, IN_USE, WRONG


class Kit:
    """The suite of a store class, and the values of its fixtures."""

    def __init__(self, cls, folder):
        self._cls, self._folder = cls, folder
        self.tmp_path_factory = SimpleNamespace(getbasetemp=lambda: folder)
        on_disk = issubclass(cls, DiskStore)
        needs = closed("each store has separate memory")
        abilities = {} if on_disk else {"sharing": needs, "persistence": needs}
        own = {**abilities, "new_store": lambda _, location: cls(location)}
        self.suite = type("Suite", (StoreSuite,), own)()
        self.location = f"disk:{folder / 'kv'}" if on_disk else "memory:"
        self.store = self.make_store()
        self.store.open(10.0)
        door = CompressedDoor if cls is CompressingStore else MemoryDoor
        self.back_door = DiskDoor(folder / "kv") if on_disk else door(self.store)

    def make_store(self, text=None):
        return self._cls(parse_location(text or self.location))

    def fails(self, test, arguments):
        """Return the text of the failure; None if the store passes."""
        method = None if test.startswith("store:") else getattr(self.suite, test)
        try:
            if method is None:
                elsewhere = self.suite.elsewhere(self.location)
                place = StorePlace(self.store, self.make_store, elsewhere, self.back_door)
                STORES.case(test.removeprefix("store:")).check(place, "pytest")
            else:
                fixtures = {name: getattr(self, name) for name in inspect.signature(method).parameters
                            if name not in arguments}  # fmt: skip
                method(**fixtures, **arguments)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - a wrong store may raise anything
            return f"{type(error).__name__}: {error}"
        return None


@pytest.fixture(autouse=True)
def same_umask():
    os.umask(mask := os.umask(0o022))
    yield
    os.umask(mask)


class SupportsSmallValues(MemoryStore):
    """A store of values of up to 100,000 bytes."""

    envelope = OperatingEnvelope(value_bytes=100_000)

    def put(self, values, timeout):
        assert all(sum(memoryview(part).nbytes for part in parts) <= 100_000 for _, parts in values)
        return super().put(values, timeout)


def test_calls_of_days_vary_in_every_argument(tmp_path):
    """Each argument of the contract has more than one value, and each kind of buffer occurs."""
    seen, buffers = {}, set()

    def noted(name):
        method = getattr(MemoryStore, name)
        parameters = [*inspect.signature(method).parameters]

        def call(self, *arguments):
            for parameter, value in zip(parameters, (self, *arguments), strict=True):
                sized = hasattr(value, "__len__")
                seen.setdefault((name, parameter), set()).add(len(value) if sized else str(value)[:60])
            if name == "put":
                buffers.update(type(part) for _, parts in arguments[0] for part in parts)
            return method(self, *arguments)

        return call

    timed = [name for name, method in vars(KVStore).items() if "timeout" in getattr(method, "__annotations__", ())]
    cls = type("Noted", (MemoryStore,), {name: noted(name) for name in timed})
    arguments = {(name, each) for name in timed for each in inspect.signature(getattr(KVStore, name)).parameters}
    for server in SERVERS:
        assert Kit(cls, tmp_path).fails(DAY, {"day": server}) is None
        few = {each for each in arguments if len(seen.get(each, ())) < 2 and each[1] != "self"}
        if not few and buffers == set(get_args(Bytes)):
            return
    pytest.fail(f"few values: {few}; buffers: {buffers}")


@pytest.mark.parametrize("logs", [True, False])
def test_secret_in_a_log_fails_the_kit(logs, tmp_path, caplog, capfd):
    class LogsItsPassword(MemoryStore):
        def __init__(self, location):
            if location.parameters:
                raise ConfigError("no_such_thing is no parameter", field="--kv-store")
            super().__init__(parse_location("memory:"))

        def get(self, keys, limit, timeout):
            if logs:
                logging.getLogger("store").debug("get of %d keys as user:hunter2", len(keys))
            return super().get(keys, limit, timeout)

    kit = Kit(LogsItsPassword, tmp_path)
    kit.suite.secrets = ("hunter2",)
    given = {"location": "memory://user:hunter2@host", "store": kit.store, "caplog": caplog, "capfd": capfd}
    if logs:
        with pytest.raises(AssertionError, match="hunter2"):
            kit.suite.test_secrets_are_never_shown(**given)
    else:
        kit.suite.test_secrets_are_never_shown(**given)


@pytest.mark.parametrize("case", ["plain", "value_bytes=737360", "before=longer,value_bytes=65537"])
def test_store_with_an_envelope_passes_within_it(case, tmp_path):
    kit = Kit(SupportsSmallValues, tmp_path)
    kit.suite.test_case(kit.store, kit.make_store, kit.location, kit.back_door, STORES.case(case))


def is_timed(found) -> bool:
    """Return True for a test that compares times: beside other tests it may pass a wrong plugin by chance."""
    return "_time_of_" in found[0]


@pytest.mark.in_turn(16, by=lambda cls: check_of(WRONG[cls][0]))
@pytest.mark.parametrize(
    "cls",
    [pytest.param(cls, marks=pytest.mark.soak if is_timed(found) else ()) for cls, found in WRONG.items()],
    ids=lambda cls: cls.__name__,
)
def test_wrong_store_fails_what_names_its_fault(cls, tmp_path):
    test, arguments = WRONG[cls]
    kit = Kit(cls, tmp_path)
    found = kit.fails(test, arguments)
    with suppress(Exception):
        kit.store.close()
    assert found, f"{cls.__name__} passes {test}"


@pytest.mark.in_turn(8, by=lambda case: check_of(case))
@pytest.mark.parametrize("case", dict.fromkeys(test for test, _ in WRONG.values() if test.startswith("store:")))
def test_intact_store_passes(case, tmp_path):
    on_disk = any(issubclass(cls, DiskStore) for cls, (test, _) in WRONG.items() if test == case)
    assert Kit(DiskStore if on_disk else MemoryStore, tmp_path).fails(case, {}) is None


@pytest.mark.parametrize(
    ("test", "arguments"),
    [
        *[(f"store:content={content},value_bytes=4097", {}) for content in CONTENTS],
        ("test_a_limit_of_one_value_holds_the_last_one_and_a_smaller_limit_none", {}),
        ("test_wrong_values_of_parameters_are_refused_by_name", {}),
        (IN_USE, FEW),
        *[
            pytest.param(DAY, {"day": name}, marks=pytest.mark.soak if server.share != 0.15 else ())
            for name, server in SERVERS.items()
        ],
    ],
    ids=lambda value: str(value)[:60],
)
def test_store_that_compresses_values_passes(test, arguments, tmp_path):
    assert Kit(CompressingStore, tmp_path).fails(test, arguments) is None
