from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.models.loading.gguf_format import PACKED_TYPES, unpack_blocks
from fd_core.ops.weights import WEIGHT_FORMATS


def test_every_type_is_a_contract_format() -> None:
    assert set(PACKED_TYPES) <= WEIGHT_FORMATS


@pytest.mark.parametrize("kind", PACKED_TYPES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), blocks=st.integers(1, 4))
def test_random_blocks_match_the_library_bitwise(kind: str, seed: int, rows: int, blocks: int) -> None:
    """Random bytes cover every integer, scale and minimum, not only those that a quantizer writes."""
    elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    stored = np.random.default_rng(seed).integers(0, 256, (rows, blocks * nbytes), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        packed = unpack_blocks(kind, stored)
        expected = dequantize(stored, GGMLQuantizationType[kind])
        found = packed.to_float32()
    assert (packed.format, packed.shape) == (kind, (rows, blocks * elements))
    assert packed.has_units == kind.endswith("_K")
    low, high = (0, 1 << packed.bits) if packed.minima is not None else (-(1 << packed.bits - 1), 1 << packed.bits - 1)
    assert low <= packed.values.min() and packed.values.max() < high
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), ~numbers)
    np.testing.assert_array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))
