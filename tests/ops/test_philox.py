import numpy as np
import pytest

from fd_core.ops.philox import philox4x32, uniform

# Known answers published with Random123 (kat_vectors): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def column(value):
    return np.array([value], np.int64)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_matches_published_known_answers(counter, key, expected):
    found = philox4x32(tuple(map(column, counter)), tuple(map(column, key)))
    assert tuple(int(word[0]) for word in found) == expected


def test_torch_generates_the_same_words():
    torch = pytest.importorskip("torch")
    for counter, key, expected in KNOWN:
        found = philox4x32(tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([word]) for word in key))
        assert tuple(int(word) for word in found) == expected


def test_number_depends_only_on_seed_and_position():
    seeds = np.array([0, 1, 2**64 - 1, 1], np.uint64)
    positions = np.array([0, 5, 2**31 - 1, 6], np.int32)
    together = uniform(seeds, positions)
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(together.tolist())) == 4


def test_seed_is_the_key_and_position_the_counter():
    seed, position = 0x0123456789ABCDEF, 1_000_003
    counter = (column(position), column(0), column(0), column(0))
    word = int(philox4x32(counter, (column(0x89ABCDEF), column(0x01234567)))[0][0])
    found = uniform(np.array([seed], np.uint64), np.array([position], np.int32))
    assert found[0] == np.float32((word >> 8) / 2**24)
    first = uniform(np.zeros(1, np.uint64), np.zeros(1, np.int32))
    assert first[0] == np.float32((0x6627E8D5 >> 8) / 2**24)


def test_numbers_are_uniform_in_the_half_open_unit_interval():
    values = uniform(np.full(100_000, 7, np.uint64), np.arange(100_000, dtype=np.int32))
    assert values.dtype == np.float32
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    # Chi-squared with 19 degrees of freedom exceeds 43.8 with probability 0.001; the draw is deterministic.
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8
