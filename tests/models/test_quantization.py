from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from gguf.quants import quantize as ggml_quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.errors import ConfigError
from fd_core.models.quantization import quantize, require_formats
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.weights import RawTensor
from tests.engine.helpers import null_engine


def error(found: np.ndarray, weight: np.ndarray) -> float:
    return float(np.square(found - weight).mean() / np.square(weight).mean())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), exponent=st.integers(-30, 30), form=st.sampled_from(["int8", "int4"]))
def test_quantization_error_is_about_one_step(seed: int, exponent: int, form: str) -> None:
    rng = np.random.default_rng(seed)
    weight = np.ldexp(rng.standard_t(3, (7, 96)), exponent).astype(np.float32)
    weight[2] = 0
    packed = quantize(RawTensor("F32", weight), form)
    assert packed.format == form and packed.group == (96 if form == "int8" else 32)
    low, high = packed.values.min(), packed.values.max()
    assert -(1 << packed.bits - 1) <= low and high < 1 << packed.bits - 1
    steps = np.repeat(np.abs(packed.scales), packed.group, axis=1)
    assert (np.abs(packed.to_float32() - weight) <= 1.04 * steps).all()
    assert not packed.to_float32()[2].any()


def test_int4_error_is_not_above_ggml_of_equal_size() -> None:
    weight = np.random.default_rng(0).standard_t(5, (64, 512)).astype(np.float32)
    kind = GGMLQuantizationType.Q4_0
    found = quantize(RawTensor("F32", weight), "int4").to_float32()
    assert error(found, weight) < 1.01 * error(dequantize(ggml_quantize(weight, kind), kind), weight)


def test_int4_scales_are_bfloat16_and_round_trip() -> None:
    weight = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    assert not (quantize(RawTensor("F32", weight), "int4").scales.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize(
    ("weight", "expected"), [(np.full((2, 32), np.inf, "f4"), "finite"), (np.ones((2, 40)), "group size 32")]
)
def test_unquantizable_weight_is_rejected_with_reason(weight: np.ndarray, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        quantize(RawTensor("F32", weight), "int4")


def test_backend_without_the_format_is_named() -> None:
    ops = NumpyOps()
    require_formats("int4", ops, "chip")
    ops.weight_formats = frozenset({"int4"})
    require_formats("auto", ops, "chip")
    with pytest.raises(ConfigError, match="the chip backend does not support int8 weights; it supports int4"):
        require_formats("int4", ops, "chip")


def test_null_backend_rejects_quantization() -> None:
    with pytest.raises(ConfigError, match="the null backend does not support int4 and int8 weights"):
        null_engine(quantization="int4")
