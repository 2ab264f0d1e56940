import msgspec
import pytest

from fd_core.config.layer_groups import LayerGroups
from fd_core.disagg.kv_compatibility import FORMAT_VERSION, KVCompatibility, difference
from tests.disagg.world import COMPATIBILITY

OTHER: dict[str, object] = {
    "version": FORMAT_VERSION + 1,
    "model": "another",
    "weights": "other",
    "dtype": "bfloat16",
    "block_size": 16,
    "num_layers": 7,
    "num_kv_heads": 7,
    "head_dim": 7,
    "groups": LayerGroups(1, 2, window=9),
    "latent": 3,
    "state_ranks": 2,
}


def changed(**fields: object) -> KVCompatibility:
    return msgspec.structs.replace(COMPATIBILITY, **fields)


def test_equal_workers_are_compatible() -> None:
    assert difference(COMPATIBILITY, changed()) is None


@pytest.mark.law("6")
def test_every_field_must_be_equal() -> None:
    assert set(OTHER) == set(KVCompatibility.__struct_fields__)
    for name, value in OTHER.items():
        assert difference(COMPATIBILITY, changed(**{name: value})) is not None
        assert difference(changed(**{name: value}), COMPATIBILITY) is not None


def test_message_gives_values_of_both_sides() -> None:
    assert difference(changed(block_size=32), COMPATIBILITY) == (
        "--block-size is 32 at the prefill worker and 2 at the decode worker"
    )


def test_causes_of_other_differences_are_reported_first() -> None:
    words = difference(COMPATIBILITY, changed(model="another", dtype="bfloat16"))
    assert words is not None and words.startswith("the dtype of the KV is float32 at the prefill worker")


def test_transfer_format_is_reported_first() -> None:
    words = difference(COMPATIBILITY, changed(**OTHER))
    assert words is not None and words.startswith(f"the format of transfers is {FORMAT_VERSION} ")


@pytest.mark.parametrize("dtype", ["x" * 10_000, "float32\nERROR: all is lost", "\x1b[31m"])
def test_unprintable_values_are_omitted(dtype: str) -> None:
    words = difference(COMPATIBILITY, changed(dtype=dtype))
    assert words == "the dtype of the KV differs between the prefill and the decode worker"


def test_digests_are_omitted_from_messages() -> None:
    words = difference(changed(model="a" * 32), changed(model="b" * 32))
    assert words is not None and "aaa" not in words and "bbb" not in words


def test_compatibility_round_trips_on_the_wire() -> None:
    terms = KVCompatibility(**OTHER)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(terms), type=KVCompatibility) == terms
