"""A warm store whose values are damaged, foreign or of another kind: each is a miss, is counted, and is never used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fd_core.kv.stores import envelope
from fd_core.kv.stores.contract import FailureReason
from tests.engine.stepping import greedy, scripted
from tests.faults.places import Place
from tests.faults.pressed import Pressed, one_value_each

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("FD_FAULTS_SEED", "20261121"))
PROMPTS = 125

on_disk = pytest.mark.parametrize("place", ["disk", pytest.param("redis", marks=pytest.mark.soak)], indirect=True)
"""What envelopes and keys decide is the same in every store."""

Corruption = Callable[[np.random.Generator, bytes, bytes], bytes]
"""From a value and another one of the same store."""


def flip_bits(rng: np.random.Generator, value: bytes, _: bytes) -> bytes:
    changed = bytearray(value)
    for place in set(rng.integers(0, 8 * len(value), int(rng.integers(1, 9))).tolist()):
        changed[place // 8] ^= 1 << place % 8
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
    """Header of one and payload of another."""
    return value[: envelope.HEADER_BYTES] + other[envelope.HEADER_BYTES :]


WAYS: tuple[Corruption, ...] = (flip_bits, flip_bits, flip_bits, cut, cut, lengthen, overwrite, move, join)


def payloads(place: Place) -> dict[bytes, bytes]:
    return {key: value[envelope.HEADER_BYTES :] for key, value in place.values().items()}


@pytest.mark.law("5.4")
@pytest.mark.parametrize("rounds", [3, pytest.param(40, marks=pytest.mark.soak)])
def test_no_corrupted_value_is_used(place: Place, secret: Path, rounds: int) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    engine, specs, whole = one_value_each(place, secret, PROMPTS, rng, num_kv_blocks=400)
    used_before = engine.tiers.loaded_blocks_store
    names = list(whole)
    for number in range(rounds):
        for index, (key, value) in enumerate(whole.items()):
            other = whole[names[index - 1]]
            changed = WAYS[int(rng.integers(len(WAYS)))](rng, value, other)
            assert changed != value
            place.door.write(key, changed)
        engine.round(specs=specs)
        assert engine.calm().loaded_blocks_store == used_before, f"a damaged value was used in round {number}"
    tiers = engine.tiers
    print(tiers.damaged)
    assert sum(tiers.damaged.values()) > 0.8 * rounds * PROMPTS, "the rest was too long to be read"
    assert set(tiers.damaged) == {str(reason) for reason in envelope.Damage}
    assert not tiers.store_errors
    for key, value in whole.items():
        place.door.write(key, value)
    engine.round(specs=specs)
    assert engine.calm().loaded_blocks_store == used_before + PROMPTS, "whole values are used"
    engine.close()


@on_disk
@pytest.mark.parametrize("rounds", [3, pytest.param(8, marks=pytest.mark.soak)])
def test_texts_under_pressure_stay_golden_while_values_are_damaged(place: Place, secret: Path, rounds: int) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    earlier = Pressed(place.location, secret)
    earlier.warm()
    earlier.close()
    engine = Pressed(place.location, secret)

    def damage() -> None:
        values = place.values()
        for index, (key, value) in enumerate(values.items()):
            if index % 2:
                place.door.write(key, WAYS[int(rng.integers(len(WAYS)))](rng, value, list(values.values())[index - 1]))

    for _ in range(rounds):
        engine.round(busy=damage)
    tiers = engine.calm()
    assert tiers.loaded_blocks_store > 0 < sum(tiers.damaged.values())
    assert engine.offload_counters.lost_tokens > 0
    engine.recover()
    engine.close()


def test_a_damaged_value_is_replaced_by_the_request_that_met_it(place: Place, secret: Path) -> None:
    engine = Pressed(place.location, secret, host_kv_memory=0, num_kv_blocks=400)
    spec = greedy("one", range(40), 2)
    texts = {"one": scripted(spec)}
    engine.golden = lambda _: texts
    engine.round(specs=[spec])
    engine.calm()
    whole = place.values()
    assert len(whole) == 2
    for key in whole:
        place.door.write(key, b"not KV at all")
    engine.round(specs=[spec])
    assert sum(engine.calm().damaged.values()) == 1, "what is behind a damaged block is not looked at"
    assert payloads(place) == {key: value[envelope.HEADER_BYTES :] for key, value in whole.items()}
    engine.close()


@on_disk
@pytest.mark.parametrize("setting", ["layout", "secret", "block size"])
def test_values_of_others_in_the_same_namespace_are_not_found_and_not_used_under_our_keys(
    place: Place, secret: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Pressed(place.location, secret)
    ours.warm()
    ours.close()
    mine = place.values()
    with monkeypatch.context() as patched:
        changes: dict[str, object] = {}
        if setting == "layout":
            patched.setattr("fd_core.engine.building.kv_offload._LAYOUT", "another")
        elif setting == "secret":
            other = secret.with_name("other")
            other.write_text("the secret of somebody else")
            other.chmod(0o600)
            changes["kv_store_secret_file"] = str(other)
        else:
            changes |= {"block_size": 8, "num_kv_blocks": 60}
        stranger = Pressed(place.location, secret, **changes)
        stranger.round()
        assert stranger.calm().damaged == {}
        stranger.close()
    foreign = [value for key, value in place.values().items() if key not in mine]
    assert len(foreign) >= len(mine), "no key is one of ours"
    again = Pressed(place.location, secret)
    for key, value in zip(mine, foreign, strict=False):
        place.door.write(key, value)
    again.round()
    expected = envelope.Damage.LENGTH if setting == "block size" else envelope.Damage.KEY
    assert set(again.calm().damaged) == {expected}
    again.recover()
    again.close()


@pytest.mark.law("5.4")
@on_disk
def test_our_keys_sealed_with_another_secret_or_by_another_format_are_not_used(
    place: Place, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(envelope, "_FORMAT_VERSION", 2)
        later = Pressed(place.location, secret)
        later.warm()
        later.close()
    sealed = payloads(place)
    engine = Pressed(place.location, secret)
    engine.round()
    assert set(engine.calm().damaged) == {envelope.Damage.VERSION}
    engine.close()
    forger = envelope.Envelope(b"another secret".ljust(32))
    for key, payload in sealed.items():
        place.door.write(key, b"".join(forger.seal(key, payload)))
    engine = Pressed(place.location, secret)
    engine.round()
    assert set(engine.calm().damaged) == {envelope.Damage.DIGEST}
    engine.recover()
    engine.close()


def test_another_type_under_every_key(place: Place, secret: Path) -> None:
    earlier = Pressed(place.location, secret)
    earlier.warm()
    earlier.close()
    engine = Pressed(place.location, secret, host_kv_memory=0)
    for key in place.values():
        place.door.delete(key)
        place.door.spoil(key)
    engine.round()
    tiers = engine.calm()
    assert not tiers.damaged
    assert set(tiers.store_errors) <= {FailureReason.MALFORMED}
    # A server replaces what is of another type; a folder is not replaced by a file.
    assert tiers.written_blocks > 0 or tiers.store_errors
    engine.recover()
    engine.close()
