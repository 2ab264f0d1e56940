"""A warm store with damaged, foreign or mistyped values: each is a miss, is counted, and is never used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fd_core.kv.stores import envelope
from fd_core.kv.stores.contract import FailureReason
from tests.faults.pressed import Pressed
from tests.faults.raw_stores import RawStore

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("FD_FAULTS_SEED", "20261121"))
on_disk = pytest.mark.parametrize("raw_store", ["disk", pytest.param("redis", marks=pytest.mark.soak)], indirect=True)
"""Envelopes and keys behave alike in every store."""

Corruption = Callable[[np.random.Generator, bytes, bytes], bytes]
"""Damage made from a value and another one of the same store."""


def flip_bits(rng: np.random.Generator, value: bytes, _: bytes) -> bytes:
    changed = bytearray(value)
    for bit in set(rng.integers(0, 8 * len(value), int(rng.integers(1, 9))).tolist()):
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def cut(rng: np.random.Generator, value: bytes, _: bytes) -> bytes:
    return value[: int(rng.integers(0, len(value)))]


def lengthen(rng: np.random.Generator, value: bytes, _: bytes) -> bytes:
    return value + rng.bytes(int(rng.integers(1, 64)))


def overwrite(rng: np.random.Generator, value: bytes, _: bytes) -> bytes:
    first = int(rng.integers(0, len(value)))
    return value[:first] + bytes(byte ^ 0xFF for byte in value[first : first + 32]) + value[first + 32 :]


def move(rng: np.random.Generator, value: bytes, other: bytes) -> bytes:
    return other


def join(rng: np.random.Generator, value: bytes, other: bytes) -> bytes:
    """Return the header of one value with the payload of the other."""
    return value[: envelope.HEADER_BYTES] + other[envelope.HEADER_BYTES :]


WAYS: tuple[Corruption, ...] = (flip_bits, flip_bits, flip_bits, cut, cut, lengthen, overwrite, move, join)


def payloads(raw_store: RawStore) -> dict[bytes, bytes]:
    return {key: value[envelope.HEADER_BYTES :] for key, value in raw_store.values().items()}


@on_disk
@pytest.mark.parametrize("rounds", [3, pytest.param(8, marks=pytest.mark.soak)])
def test_texts_under_pressure_stay_golden_while_values_are_damaged(
    raw_store: RawStore, secret: Path, rounds: int
) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    earlier = Pressed(raw_store.location, secret)
    earlier.warm()
    earlier.close()
    engine = Pressed(raw_store.location, secret)

    def damage() -> None:
        values = raw_store.values()
        for index, (key, value) in enumerate(values.items()):
            if index % 2:
                raw_store.access.write(
                    key, WAYS[int(rng.integers(len(WAYS)))](rng, value, list(values.values())[index - 1])
                )

    for _ in range(rounds):
        engine.round(busy=damage)
    tiers = engine.calm()
    assert tiers.loaded_blocks_store > 0 < sum(tiers.damaged.values())
    assert engine.offload_counters.lost_tokens > 0
    engine.recover()
    engine.close()


@on_disk
@pytest.mark.parametrize("setting", ["layout", "secret", "block size"])
def test_foreign_values_in_the_same_namespace_are_never_used(
    raw_store: RawStore, secret: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Pressed(raw_store.location, secret)
    ours.warm()
    ours.close()
    mine = raw_store.values()
    with monkeypatch.context() as patched:
        changes: dict[str, object] = {}
        if setting == "layout":
            patched.setattr("fd_core.engine.building.kv_offload._LAYOUT", "another")
        elif setting == "secret":
            other = secret.with_name("other")
            other.write_text("a foreign secret")
            other.chmod(0o600)
            changes["kv_store_secret_file"] = str(other)
        else:
            changes |= {"block_size": 8, "num_kv_blocks": 60}
        stranger = Pressed(raw_store.location, secret, **changes)
        stranger.round()
        assert stranger.calm().damaged == {}
        stranger.close()
    foreign = [value for key, value in raw_store.values().items() if key not in mine]
    assert len(foreign) >= len(mine), "a key is one of ours"
    again = Pressed(raw_store.location, secret)
    for key, value in zip(mine, foreign, strict=False):
        raw_store.access.write(key, value)
    again.round()
    expected = envelope.Damage.LENGTH if setting == "block size" else envelope.Damage.KEY
    assert set(again.calm().damaged) == {expected}
    again.recover()
    again.close()


@pytest.mark.law("5.4")
@on_disk
def test_values_sealed_with_another_secret_or_format_are_not_used(
    raw_store: RawStore, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(envelope, "_FORMAT_VERSION", 2)
        later = Pressed(raw_store.location, secret)
        later.warm()
        later.close()
    sealed = payloads(raw_store)
    engine = Pressed(raw_store.location, secret)
    engine.round()
    assert set(engine.calm().damaged) == {envelope.Damage.VERSION}
    engine.close()
    forger = envelope.Envelope(b"another secret".ljust(32))
    for key, payload in sealed.items():
        raw_store.access.write(key, b"".join(forger.seal(key, payload)))
    engine = Pressed(raw_store.location, secret)
    engine.round()
    assert set(engine.calm().damaged) == {envelope.Damage.DIGEST}
    engine.recover()
    engine.close()


def test_values_of_another_type_are_misses(raw_store: RawStore, secret: Path) -> None:
    earlier = Pressed(raw_store.location, secret)
    earlier.warm()
    earlier.close()
    engine = Pressed(raw_store.location, secret, host_kv_memory=0)
    for key in raw_store.values():
        raw_store.access.delete(key)
        raw_store.access.spoil(key)
    engine.round()
    tiers = engine.calm()
    assert not tiers.damaged
    assert set(tiers.store_errors) <= {FailureReason.MALFORMED}
    # A Redis server replaces values of another type; a folder is not replaced by a file.
    assert tiers.written_blocks > 0 or tiers.store_errors
    engine.recover()
    engine.close()
