import msgspec
import pytest

from fd_core.disagg.kv_compatibility import FORMAT_VERSION, KVCompatibility, difference
from tests.disagg.world import COMPATIBILITY

OTHER: dict[str, object] = {
    "version": FORMAT_VERSION + 1,
    "model": "another",
    "dtype": "bfloat16",
    "block_size": 16,
    "num_layers": 7,
    "num_kv_heads": 7,
    "head_dim": 7,
}


def changed(**fields: object) -> KVCompatibility:
    return msgspec.structs.replace(COMPATIBILITY, **fields)


def test_equal_workers_fit() -> None:
    assert difference(COMPATIBILITY, changed()) is None


@pytest.mark.law("6")
def test_every_field_has_to_be_equal() -> None:
    assert set(OTHER) == set(KVCompatibility.__struct_fields__)
    for name, value in OTHER.items():
        assert difference(COMPATIBILITY, changed(**{name: value})) is not None
        assert difference(changed(**{name: value}), COMPATIBILITY) is not None


def test_both_values_are_told_each_at_its_side() -> None:
    assert difference(changed(block_size=32), COMPATIBILITY) == (
        "--block-size is 32 at the prefill worker and 2 at the decode worker"
    )


def test_what_explains_the_model_is_told_first() -> None:
    words = difference(COMPATIBILITY, changed(model="another", dtype="bfloat16"))
    assert words is not None and words.startswith("the dtype of the KV is float32 at the prefill worker")


def test_another_format_is_told_before_all() -> None:
    words = difference(COMPATIBILITY, changed(**OTHER))
    assert words is not None and words.startswith(f"the format of transfers is {FORMAT_VERSION} ")


@pytest.mark.parametrize("dtype", ["x" * 10_000, "float32\nERROR: all is lost", "\x1b[31m"])
def test_what_would_not_print_well_is_not_told(dtype: str) -> None:
    words = difference(COMPATIBILITY, changed(dtype=dtype))
    assert words == "the dtype of the KV differs between the prefill and the decode worker"


def test_a_digest_is_of_no_use_to_people() -> None:
    words = difference(changed(model="a" * 32), changed(model="b" * 32))
    assert words is not None and "aaa" not in words and "bbb" not in words


def test_they_come_back_from_the_wire_as_they_were() -> None:
    terms = KVCompatibility(**OTHER)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(terms), type=KVCompatibility) == terms
