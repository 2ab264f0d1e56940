"""A store beside a plain dict, under random calls, restarts, losses and strangers.

The law: a store may forget what it was allowed to forget, but never answers a value that was not put under that key.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from fd_core.kv.stores.contract import KVStore
from fd_core.testing.stores.back_door import BackDoor
from fd_core.testing.stores.calls import TIMEOUT, as_bytes, usable_again

LIMIT = 3000

_KEYS = [bytes([number]) * 16 for number in range(6)]
_keys = st.lists(st.sampled_from(_KEYS), max_size=8)
_KINDS = {"put": 1, "stranger": 2, "too long": LIMIT + 1}


def _value(key: bytes, kind: str) -> bytes:
    """The value under a key never changes, so it is made of the key; a stranger's is another one."""
    length = _KINDS[kind] if kind == "too long" else 1 + key[0] * 97 % LIMIT
    return (key + kind.encode()).ljust(length, b".")[:length]


class BesideADict(RuleBasedStateMachine):
    """The model: for each key every answer that is allowed, where None is "absent"."""

    store: KVStore
    reopen: Callable[[], KVStore] | None
    door: BackDoor
    survives_restart: bool

    @initialize()
    def start(self) -> None:
        """Begin with nothing under any key."""
        for key in _KEYS:
            self.door.delete(key)
        self.allowed: dict[bytes, set[bytes | None]] = {key: {None} for key in _KEYS}

    @rule(keys=_keys, cut=st.integers(0, 50))
    def put(self, keys: list[bytes], cut: int) -> None:
        """Values arrive in parts and replace what was there."""
        whole = [(key, _value(key, "put")) for key in keys]
        stored = self.store.put([(key, (value[:cut], value[cut:])) for key, value in whole], TIMEOUT)
        assert stored == len(keys)
        for key, value in whole:
            self.allowed[key] = {value}

    @rule(keys=_keys)
    def get(self, keys: list[bytes]) -> None:
        """Every answer is one that is allowed."""
        found = self.store.get(keys, LIMIT, TIMEOUT)
        assert len(found) == len(keys)
        for key, answer in zip(keys, as_bytes(found), strict=True):
            assert answer in {self._seen(key, allowed) for allowed in self.allowed[key]}, (key, answer)

    @rule(keys=_keys)
    def longest_prefix(self, keys: list[bytes]) -> None:
        """A prefix is as long as a get would find it."""
        length = self.store.longest_prefix(keys, LIMIT, TIMEOUT)
        found = self.store.get(keys, LIMIT, TIMEOUT)
        assert length == next((index for index, value in enumerate(found) if value is None), len(keys))

    @rule(keys=_keys)
    def delete(self, keys: list[bytes]) -> None:
        """Afterwards nothing is there, and the number is that of the values that were."""
        certain = sum(None not in self.allowed[key] for key in set(keys))
        possible = sum(self.allowed[key] != {None} for key in set(keys))
        assert certain <= self.store.delete(keys, TIMEOUT) <= possible
        for key in keys:
            assert self.door.read(key) is None
            self.allowed[key] = {None}

    @rule(key=st.sampled_from(_KEYS))
    def loss(self, key: bytes) -> None:
        """A value vanishes behind the store's back."""
        self.door.delete(key)
        self.allowed[key] = {None}

    @rule(key=st.sampled_from(_KEYS), kind=st.sampled_from(["stranger", "too long"]))
    def stranger(self, key: bytes, kind: str) -> None:
        """Somebody else writes under a key."""
        self.door.write(key, _value(key, kind))
        self.allowed[key] = {_value(key, kind)}

    @precondition(lambda self: self.reopen is not None)
    @rule()
    def close_and_reopen(self) -> None:
        """An engine ends and another one begins."""
        assert self.reopen is not None
        type(self).store.close()
        type(self).store = self.reopen()

    @precondition(lambda self: type(self.door).restart is not BackDoor.restart)
    @rule()
    def restart(self) -> None:
        """What holds the values restarts; the same store goes on."""
        self.door.restart()
        usable_again(self.store)
        if not self.survives_restart:
            for allowed in self.allowed.values():
                allowed.add(None)

    def _seen(self, key: bytes, value: bytes | None) -> bytes | None:
        return None if value is None or len(value) > LIMIT else value


def run_beside_a_dict(
    store: KVStore,
    reopen: Callable[[], KVStore] | None,
    door: BackDoor,
    *,
    survives_restart: bool,
    examples: int,
) -> None:
    """Compare the store with a dict in `examples` random runs.

    `reopen` gives another store on the same place once one was closed, None if values do not outlive a store;
    `survives_restart`: whether they outlive the back door's restart.
    """
    made = {
        "store": store,
        "reopen": staticmethod(reopen) if reopen else None,
        "door": door,
        "survives_restart": survives_restart,
    }
    run_state_machine_as_test(
        type("BesideADict", (BesideADict,), made),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
