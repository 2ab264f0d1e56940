import pytest

from fd_core.config.sizes import format_size, parse_size


@pytest.mark.parametrize(
    "text, count", [("1", 1), ("256M", 256 * 10**6), ("1.5Gi", 3 << 29), (" 2 kib ", 2048), ("1TB", 10**12)]
)
def test_sizes_are_parsed(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "1X", "1e9", "many", "9" * 20, "1Gi2"])
def test_invalid_size_is_rejected(text):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize("count, text", [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (20 << 30, "20.0 GiB")])
def test_sizes_are_formatted(count, text):
    assert format_size(count) == text
