"""Every kind of damage to a KV value outside the engine is read, detected by kind, and never used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fd_core.disagg.connectors.contract import Connector, ConnectorSettings, KVInbox, KVOutbox
from fd_core.disagg.connectors.kv_store import KVStoreConnector
from fd_core.disagg.connectors.shared_memory import SharedMemoryConnector
from fd_core.disagg.connectors.tcp import TCPConnector
from fd_core.kv.stores.disk import DiskStore
from fd_core.kv.stores.envelope import Damage, Damaged, Envelope
from fd_core.kv.stores.location import parse_location
from tests.disagg import pair as pairs
from tests.disagg.pair import BLOCK, SIZE, Pair
from tests.faults.conftest import raw_store, redis_server, secret, start_redis  # noqa: F401 - fixtures
from tests.faults.pressed import one_value_each
from tests.faults.raw_stores import RawStore
from tests.hostile.damages import damages
from tests.hostile.limits import at_length
from tests.kv.tiers.scripted import SECRET

STEP = at_length(4, 1)
FIRST, OTHER = b"k" * 16, b"o" * 16
PAYLOAD = bytes(range(128))


def whole(envelope: Envelope, payload: bytes = PAYLOAD) -> tuple[bytes, bytes]:
    return b"".join(envelope.seal(FIRST, payload)), b"".join(envelope.seal(OTHER, payload[::-1]))


@pytest.mark.law("5.4")
def test_envelope_reports_each_kind_of_damage_and_opens_none(
    record_property: Callable[[str, object], None],
) -> None:
    envelope = Envelope(SECRET)
    value, other = whole(envelope)
    found = damages(envelope, value, other)
    record_property("inputs", len(found))
    assert len(found) > 500 and all(changed != value for changed, _ in found.values())
    for name, (changed, reason) in found.items():
        with pytest.raises(Damaged) as caught:
            envelope.open(FIRST, changed, len(PAYLOAD))
        assert caught.value.reason is (reason or Damage.LENGTH), name
    assert {reason for _, reason in found.values()} == {*Damage, None}, "a reason has no case"
    assert envelope.open(FIRST, value, len(PAYLOAD)) == PAYLOAD


@pytest.mark.law("5.4")
def test_engine_reads_every_damaged_store_value_and_uses_none(
    raw_store: RawStore,  # noqa: F811
    secret: Path,  # noqa: F811
    record_property: Callable[[str, object], None],
) -> None:
    """One prompt for each damage: the engine reads exactly the damaged value, and the text stays golden."""
    count = len(damages(Envelope(SECRET), *whole(Envelope(SECRET)), STEP))
    record_property("inputs", count)
    engine, specs, values = one_value_each(raw_store, secret, count, np.random.default_rng(5), num_kv_blocks=2000)
    used_before = engine.tiers.loaded_blocks_store
    envelope: Envelope = engine._offload._reader._envelope
    keys, expected = list(values), {}
    kinds = list(damages(envelope, values[keys[0]], values[keys[1]], STEP))
    for index, (key, kind) in enumerate(zip(keys, kinds, strict=True)):
        expected[key] = damages(envelope, values[key], values[keys[index - 1]], STEP)[kind]
        raw_store.access.write(key, expected[key][0])

    given: dict[bytes, object] = {}
    store = engine._offload._store
    assert store is not None
    real_get = store.get

    def get(keys, limit, timeout):  # type: ignore[no-untyped-def]
        answers = real_get(keys, limit, timeout)
        given.update((key, None if value is None else bytes(value)) for key, value in zip(keys, answers, strict=True))
        return answers

    store.get = get  # type: ignore[method-assign]
    engine.round(specs=specs)  # asserts that the texts are golden
    tiers = engine.calm()
    read = {key for key, (_, reason) in expected.items() if reason is not None}
    assert {key for key, value in given.items() if value is not None} == read, "the engine did not read every value"
    assert all(given[key] == expected[key][0] for key in read), "the engine read other bytes than the damaged ones"
    assert tiers.damaged == Counter(str(expected[key][1]) for key in read)
    assert tiers.loaded_blocks_store == used_before and not tiers.store_errors
    engine.round(specs=specs)
    assert engine.calm().loaded_blocks_store == used_before + count, "not all were replaced by intact values"
    engine.close()


class Damaging(Connector):
    """Real connector whose outbox damages the second piece of each lease."""

    name = "damaging"

    def __init__(self, real: Connector) -> None:
        super().__init__(real.settings)
        self.real = real
        self.kind: str | None = None
        self.put_values: list[bytes] = []
        self.taken: list[bytes] = []

    def open_inbox(self, lease, *, pieces, window, value_bytes):
        return DamagedInbox(self, self.real.open_inbox(lease, pieces=pieces, window=window, value_bytes=value_bytes))

    def open_outbox(self, lease, address, *, window, value_bytes):
        return DamagingOutbox(self, self.real.open_outbox(lease, address, window=window, value_bytes=value_bytes))

    def close(self) -> None:
        self.real.close()


class DamagedInbox(KVInbox):
    def __init__(self, owner: Damaging, real: KVInbox) -> None:
        self.owner, self.real, self.address = owner, real, real.address

    def take(self, index, reference, frames):
        value = self.real.take(index, reference, frames)
        if index == 1:
            self.owner.taken.append(bytes(value))
        return value

    def done(self, index, reference):
        self.real.done(index, reference)

    def close(self):
        self.real.close()


class DamagingOutbox(KVOutbox):
    def __init__(self, owner: Damaging, real: KVOutbox) -> None:
        self.owner, self.real, self.earlier = owner, real, b""

    def put(self, index, parts):
        value = b"".join(bytes(part) for part in parts)
        if index == 1 and self.owner.kind is not None:
            value, _ = damages(Envelope(SECRET), value, self.earlier, STEP)[self.owner.kind]
            self.owner.put_values.append(value)
        self.earlier = self.earlier or value
        return self.real.put(index, [value])

    def close(self):
        self.real.close()


@pytest.fixture(params=["tcp", "shared_memory", "kv_store"])
def connector(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Damaging]:
    settings = ConnectorSettings(partial(DiskStore, parse_location(f"disk:{tmp_path / 'kv'}")))
    real = {"tcp": TCPConnector, "shared_memory": SharedMemoryConnector, "kv_store": KVStoreConnector}[request.param]
    made = Damaging(real(settings))
    yield made
    made.close()


@pytest.mark.law("6.2", "6.3")
def test_damage_in_transit_between_workers_ends_the_lease(
    connector: Damaging, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """The pair checks that transferred KV is right; the decode worker recomputes what is damaged."""
    value, other = whole(Envelope(SECRET), PAYLOAD[: BLOCK.bytes])
    kinds = damages(Envelope(SECRET), value, other, STEP)
    record_property("inputs", len(kinds))
    monkeypatch.setattr(pairs, "Frames", lambda: connector)
    with Pair() as pair:
        for kind, (_, reason) in kinds.items():
            connector.kind = kind
            before = len(connector.taken)
            outcome = pair.answer(pair.fetch(2 * SIZE)).outcome
            if reason is None:
                # The connector rejects the piece, and may free the previous one before it is taken.
                assert outcome in ("lost", "damaged"), (kind, outcome)
                assert len(connector.taken) == before, kind
                continue
            assert outcome == "damaged", (kind, outcome)
            assert len(connector.taken) == before + 1, kind
            assert connector.taken[-1] == connector.put_values[-1], kind
        assert len(connector.taken) > 100
        connector.kind = None
        assert pair.answer(pair.fetch(2 * SIZE)).outcome == "transferred"
        pair.idle()
