"""Tiles of attention: results depend on the model alone, and heads without a mask have the largest tiles."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from fd_gpu_cuda.kernels.attention import HeadSizes, Tile, decode_tile, prefill_tile

FORMS = {"16 bits": (2, 2), "KV of 8 bits": (1, 2), "float32": (4, 4), "float32 with KV of 8 bits": (1, 4)}
"""Bytes of an element of keys and of queries."""
DEVICES = (64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024)
"""Bytes that a program can have: of Turing, Ada, A100 and H100."""


@pytest.mark.parametrize("cut", [decode_tile, prefill_tile])
def test_device_affects_only_the_number_of_loads_in_flight(cut: Callable[[HeadSizes, int], Tile]) -> None:
    widths = [(width, 0) for width in (24, 80, 96, 128, 192, 256)] + [(24, 8), (256, 32), (512, 64)]
    for shared, (width, rotated), form, windowed in product((1, 4, 8, 40), widths, FORMS, (False, True)):
        sizes = HeadSizes(shared, width, *FORMS[form], windowed, rotated)
        assert len({cut(sizes, memory)._replace(num_stages=1) for memory in DEVICES}) == 1, sizes


@pytest.mark.parametrize(
    ("width", "decode", "prefill"),
    [
        (64, (4, 16, 128, 4), (32, 128, 64, 8)),
        (128, (4, 16, 64, 4), (32, 128, 64, 8)),
        (256, (4, 16, 32, 4), (16, 64, 32, 8)),
    ],
)
def test_four_heads_of_a_power_of_two_take_all_registers(
    width: int, decode: tuple[int, ...], prefill: tuple[int, ...]
) -> None:
    """Queries, lines, keys and warps."""
    sizes = HeadSizes(4, width, 2, 2)
    assert decode_tile(sizes, DEVICES[-1])[:4] == decode
    assert prefill_tile(sizes, DEVICES[-1])[:4] == prefill


@pytest.mark.parametrize(
    ("form", "width", "decode"),
    [
        ("16 bits", 96, (4, 16, 64, 4)),
        ("16 bits", 192, (4, 16, 32, 4)),
        ("KV of 8 bits", 96, (4, 16, 64, 4)),
        ("KV of 8 bits", 192, (4, 16, 32, 4)),
        ("float32", 192, (4, 16, 32, 8)),
        ("float32 with KV of 8 bits", 192, (4, 16, 16, 8)),
    ],
)
def test_four_masked_heads_take_as_much_as_stays_in_registers(form: str, width: int, decode: tuple[int, ...]) -> None:
    """As compiled for 8.0, 8.9 and 9.0 by `FD_GPU_ALL=1 pytest tests/test_compile_attention.py`."""
    assert decode_tile(HeadSizes(4, width, *FORMS[form]), DEVICES[-1])[:4] == decode
