"""Quantized folders as their tools write them, compared with the formula of each tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fd_core.errors import ModelError
from fd_core.models.opening import open_checkpoint
from fd_core.ops.weights import WEIGHT_FORMATS, PackedTensor, RawTensor

OUT, IN, GROUP = 24, 64, 16
GROUPS = IN // GROUP
NAME = "model.layers.0.mlp.up_proj"
Tensors = dict[str, np.ndarray]
Written = tuple[dict[str, Any], Tensors, np.ndarray]
"""`quantization_config`, the tensors of one module, and its dequantized weight [OUT, IN] in float64."""

RNG = np.random.default_rng(5)


def numbers(low: int, high: int, *shape: int) -> np.ndarray:
    return RNG.integers(low, high, shape)


def sizes(*shape: int) -> np.ndarray:
    return RNG.uniform(0.01, 0.1, shape).astype(np.float16)


def pack(values: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Pack unsigned numbers along an axis into int32, the first into the lowest bits."""
    values, count = np.moveaxis(values, axis, -1), 32 // bits
    padded = np.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, -values.shape[-1] % count)])
    words = np.zeros((*padded.shape[:-1], padded.shape[-1] // count), np.uint64)
    for offset in range(count):
        words |= padded[..., offset::count].astype(np.uint64) << np.uint64(bits * offset)
    return np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))


def spread(values: np.ndarray, axis: int) -> np.ndarray:
    return np.repeat(values, GROUP, axis=axis).astype(np.float64)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


def gptq(bits: int = 4, *, symmetric: bool = False, version: str = "gptq", **settings: Any) -> Written:
    top = 1 << bits
    q, s = numbers(0, top, IN, OUT), sizes(GROUPS, OUT)
    z = np.full((GROUPS, OUT), top // 2) if symmetric else numbers(1, top, GROUPS, OUT)
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": version, **settings}
    stored = z if version == "gptq_v2" else z - 1
    tensors = {
        "qweight": pack(q, bits, 0),
        "qzeros": pack(stored, bits, 1),
        "scales": s,
        "g_idx": (np.arange(IN) // GROUP).astype(np.int32),
    }
    return config, tensors, ((q - spread(z, 0)) * spread(s, 0)).T


def awq(**settings: Any) -> Written:
    q, z, s = numbers(0, 16, IN, OUT), numbers(0, 16, GROUPS, OUT), sizes(GROUPS, OUT)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])

    def words(values: np.ndarray) -> np.ndarray:
        return pack(values.reshape(len(values), -1, 8)[:, :, order].reshape(values.shape), 4, 1)

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm", **settings}
    tensors = {"qweight": words(q), "qzeros": words(z), "scales": s}
    return config, tensors, ((q - spread(z, 0)) * spread(s, 0)).T


def words_of(bits: int, *, symmetric: bool = True, channel: bool = False) -> Written:
    """Return compressed-tensors' pack-quantized; signed numbers are stored with half of their range added."""
    half = 1 << (bits - 1)
    groups = 1 if channel else GROUPS
    q, s = numbers(-half, half, OUT, IN), sizes(OUT, groups)
    z = numbers(-half, half, OUT, groups) * (not symmetric)
    strategy = {"strategy": "channel"} if channel else {"strategy": "group", "group_size": GROUP}
    tensors = {
        "weight_packed": pack(q + half, bits, 1),
        "weight_scale": s,
        "weight_shape": np.array([OUT, IN], np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(z + half, bits, 0)
    repeats = IN // groups
    expected = (q - np.repeat(z, repeats, 1)) * np.repeat(s, repeats, 1).astype(np.float64)
    return compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **strategy), tensors, expected


def bytes_of(*, symmetric: bool = True, whole: bool = False) -> Written:
    """Return compressed-tensors' int-quantized: W8A8."""
    q = numbers(-128, 128, OUT, IN)
    s = sizes(1) if whole else sizes(OUT, 1)
    z = numbers(-128, 128, *s.shape) * (not symmetric)
    tensors = {"weight": q.astype(np.int8), "weight_scale": s, "input_scale": np.ones(1, np.float32)}
    if not symmetric:
        tensors["weight_zero_point"] = z.astype(np.int8)
    config = compressed("int-quantized", num_bits=8, symmetric=symmetric, strategy="tensor" if whole else "channel")
    return config, tensors, (q - z) * s.astype(np.float64)


CASES: Mapping[str, tuple[str, bool, Written]] = {
    "W8A8": ("int8", False, bytes_of()),
    "W8A8 asymmetric": ("int8", True, bytes_of(symmetric=False)),
    "W8A8 one scale": ("int8", False, bytes_of(whole=True)),
    "W8A16": ("int8", False, words_of(8, channel=True)),
    "W8A16 asymmetric groups": ("int8", True, words_of(8, symmetric=False)),
    "W4A16": ("int4", False, words_of(4)),
    "W4A16 asymmetric": ("int4", True, words_of(4, symmetric=False)),
    "W4A16 one scale a row": ("int4", False, words_of(4, channel=True)),
    "GPTQ": ("gptq", True, gptq()),
    "GPTQ symmetric": ("gptq", False, gptq(symmetric=True)),
    "GPTQ with modules left out": ("gptq", True, gptq(dynamic={r"-:.*\.down_proj": {}})),
    "GPTQ second version": ("gptq", True, gptq(version="gptq_v2")),
    "GPTQ 8 bits": ("gptq", True, gptq(8)),
    "GPTQ 8 bits symmetric": ("gptq", False, gptq(8, symmetric=True)),
    "AWQ": ("awq", True, awq()),
}


def write(folder: Path, written: Written, **others: np.ndarray) -> Path:
    config, tensors, _ = written
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    named = {f"{NAME}.{kind}": np.ascontiguousarray(values) for kind, values in tensors.items()}
    norm = {"model.norm.weight": np.ones(IN, np.float32), f"{NAME}.bias": np.zeros(OUT, np.float16)}
    save_file(named | norm | others, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_dequantized_weight_matches_its_tool(tmp_path: Path, case: str) -> None:
    form, minima, written = CASES[case]
    with open_checkpoint(write(tmp_path, written)) as checkpoint:
        assert set(checkpoint.names()) == {f"{NAME}.weight", f"{NAME}.bias", "model.norm.weight"}
        assert checkpoint.shape(f"{NAME}.weight") == (OUT, IN)
        assert checkpoint.stored_format(f"{NAME}.weight") == form
        packed = checkpoint.read_weight(f"{NAME}.weight", WEIGHT_FORMATS)
        expanded = checkpoint.read(f"{NAME}.weight")
    assert isinstance(packed, PackedTensor) and packed.format == form
    assert (packed.minima is not None) == minima
    unsigned = minima and packed.bits < 8
    low, high = (0, 1 << packed.bits) if unsigned else (-(1 << packed.bits - 1), 1 << packed.bits - 1)
    assert low <= packed.values.min() and packed.values.max() < high
    np.testing.assert_allclose(packed.to_float32(), written[2], rtol=1e-6, atol=3e-6)
    np.testing.assert_array_equal(expanded.to_float32(), packed.to_float32())


@pytest.mark.parametrize("tool", [gptq, lambda: words_of(4), lambda: words_of(4, symmetric=False)])
def test_columns_in_another_order_are_dequantized(tmp_path: Path, tool: Any) -> None:
    """GPTQ's desc_act and the actorder of compressed-tensors: `g_idx` says of which group a column is."""
    config, tensors, expected = tool()
    order = RNG.permutation(IN)
    kind, axis = ("qweight", 0) if "qweight" in tensors else ("weight_packed", 1)
    values = np.moveaxis(tensors[kind].view(np.uint32), axis, -1)
    each = ((values[..., np.newaxis] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15).reshape(OUT, IN)[:, order]
    mixed = {kind: pack(each.T if axis == 0 else each, 4, axis)}
    mixed["g_idx" if axis == 0 else "weight_g_idx"] = (order // GROUP).astype(np.int32)
    with open_checkpoint(write(tmp_path, (config, tensors | mixed, expected))) as checkpoint:
        assert checkpoint.stored_format(f"{NAME}.weight") in ("gptq", "int4")
        found = checkpoint.read_weight(f"{NAME}.weight", WEIGHT_FORMATS)
    assert isinstance(found, RawTensor)
    np.testing.assert_allclose(found.to_float32(), expected[:, order], rtol=1e-6, atol=3e-6)


def fp8(
    method: str, kind: str, scale: np.ndarray, block: int | None = None, codes: np.ndarray | None = None
) -> Written:
    """Return every finite number of the type, and scales."""
    pytest.importorskip("torch")
    if codes is None:
        codes = np.concatenate([np.arange(127), np.arange(128, 255)] * 7)[: OUT * IN]
    weight = torch_fp8(codes.astype(np.uint8)).reshape(OUT, IN)
    config: dict[str, Any] = {"quant_method": method}
    if method == "compressed-tensors":
        blocks = {} if block is None else {"strategy": "block", "block_structure": [block, block]}
        config = compressed("float-quantized", num_bits=8, **blocks | {"type": "float"})
    elif block is not None:
        config["weight_block_size"] = [block, block]
    factor = scale.astype(np.float64)
    if block is not None:
        factor = factor.repeat(block, 0)[:OUT].repeat(block, 1)[:, :IN]
    with np.errstate(invalid="ignore"):
        expected = weight.double().numpy() * factor
    return config, {"weight": weight, kind: scale}, expected


def torch_fp8(codes: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def write_fp8(folder: Path, written: Written) -> Path:
    """Write fp8 with torch, as numpy has no such type."""
    import torch
    from safetensors.torch import save_file as save_torch

    (folder / "config.json").write_text(json.dumps({"quantization_config": written[0]}))
    save_torch(
        {f"{NAME}.{kind}": torch.as_tensor(each).contiguous() for kind, each in written[1].items()},
        folder / "model.safetensors",
    )
    return folder


FP8_SCALES = [
    ("fp8", "weight_scale", (), None, 1),
    ("fp8", "weight_scale", (1,), None, 1),
    ("fbgemm_fp8", "weight_scale", (OUT, 1), None, 1),
    ("fp8", "weight_scale_inv", (2, 4), 16, 4),
    ("fp8", "weight_scale_inv", (1, 2), 48, 4),
    ("fp8", "weight_scale_inv", (1, 1), 128, 1),
    ("compressed-tensors", "weight_scale", (OUT, 1), None, 1),
    ("compressed-tensors", "weight_scale", (1, 2), 32, 2),
]


@pytest.mark.parametrize(("method", "kind", "shape", "block", "groups"), FP8_SCALES)
def test_fp8_matches_torch(
    tmp_path: Path, method: str, kind: str, shape: tuple[int, ...], block: int | None, groups: int
) -> None:
    """Packed if supported, with the scales of its blocks for each row; a block may end with the row."""
    written = fp8(method, kind, np.asarray(RNG.uniform(0.5, 2, shape), np.float32), block)
    with open_checkpoint(write_fp8(tmp_path, written)) as checkpoint:
        assert checkpoint.names() == (f"{NAME}.weight",)
        assert checkpoint.stored_format(f"{NAME}.weight") == "F8_E4M3"
        packed = checkpoint.read_weight(f"{NAME}.weight", WEIGHT_FORMATS)
        expanded = checkpoint.read_weight(f"{NAME}.weight", WEIGHT_FORMATS - {"F8_E4M3"})
    assert isinstance(packed, PackedTensor) and packed.format == "F8_E4M3"
    assert packed.scales.shape == (OUT, groups) and packed.minima is None
    np.testing.assert_array_equal(packed.to_float32(), written[2].astype(np.float32))
    assert isinstance(expanded, RawTensor)
    np.testing.assert_array_equal(expanded.to_float32(), packed.to_float32())


@pytest.mark.parametrize(
    ("scale", "code", "error"),
    [
        (1.0, 0x7F, r"up_proj\.weight' has values that are not finite"),
        (1.0, 0xFF, r"up_proj\.weight' has values that are not finite"),
        (np.nan, 0, r"up_proj\.weight_scale' has scales that are not finite"),
        (1e37, 0, r"up_proj\.weight_scale' has scales that make values overflow"),
    ],
)
def test_damaged_fp8_is_rejected_by_name(tmp_path: Path, scale: float, code: int, error: str) -> None:
    codes = np.zeros(OUT * IN, np.uint8)
    codes[7] = code
    folder = write_fp8(tmp_path, fp8("fp8", "weight_scale", np.full(1, scale, np.float32), codes=codes))
    with open_checkpoint(folder) as checkpoint, pytest.raises(ModelError, match=rf"model\.safetensors: .*{error}"):
        checkpoint.read_weight(f"{NAME}.weight", WEIGHT_FORMATS)


def without(written: Written, kind: str) -> Written:
    config, tensors, expected = written
    return config, {name: each for name, each in tensors.items() if name != kind}, expected


def changed(written: Written, kind: str, values: np.ndarray) -> Written:
    config, tensors, expected = written
    return config, tensors | {kind: values}, expected


def configured(written: Written, **settings: Any) -> Written:
    return {**written[0], **settings}, *written[1:]


@pytest.mark.parametrize(
    ("written", "error"),
    [
        (without(gptq(), "scales"), r"model\.safetensors: tensor '.*up_proj\.scales' is missing"),
        (without(gptq(), "qzeros"), r"up_proj\.qzeros' is missing"),
        (without(words_of(4), "weight_scale"), r"up_proj\.weight_scale' is missing"),
        (without(words_of(4), "weight_shape"), r"up_proj\.weight_shape' is missing"),
        (without(bytes_of(), "weight_scale"), r"up_proj\.weight_scale' is missing"),
        (without(bytes_of(), "weight"), r"up_proj\.weight' is missing"),
        (gptq(group_size=48), "64 values, not a multiple of group size 48"),
        (gptq(group_size=32), r"up_proj\.scales' has shape \(4, 24\), expected \(2, 24\)"),
        (gptq(bits=4, group_size=0), "group_size must be a positive integer"),
        (awq(bits=8), "AWQ weights of 8 bits"),
        (awq(version="gemv"), "'gemv'"),
        (configured(gptq(), bits=3), "bits is 3; 4 and 8 are supported"),
        (gptq(dynamic={"-:lm_head": {}, r"+:.*\.up_proj": {"bits": 8}}), r"config\.json: .*dynamic .*up_proj"),
        (changed(gptq(), "g_idx", np.arange(IN, dtype=np.int32) // GROUP + 1), r"g_idx' names groups .* from 0 to 3"),
        (changed(gptq(), "scales", np.zeros((GROUPS, OUT), np.int32)), "stored as I32, expected F32 or F16 or BF16"),
        (changed(words_of(4), "weight_shape", np.array([OUT, 2 * IN])), "does not match 24 rows of 128 values"),
        (changed(words_of(4), "weight_shape", np.array([-1, 1 << 62])), "does not match"),
        (changed(words_of(4), "weight_scale", sizes(OUT, 5)), "has 5 scales for 64 values, not groups of 16"),
        (changed(words_of(4), "weight_scale", sizes(OUT, 2)), "has 2 scales for 64 values, not groups of 16"),
        (changed(words_of(4), "weight_scale", sizes(OUT, 0)), "does not match"),
        (changed(words_of(4, symmetric=False), "weight_zero_point", np.zeros((2, 4), np.int32)), "not match 24 rows"),
        (configured(words_of(4), format="marlin-24"), "the format 'marlin-24' are not supported"),
        (configured(words_of(4), sparsity_config={"format": "sparse-24-bitmask"}), "'sparse-24-bitmask'"),
        (configured(words_of(4), config_groups={}), "config_groups describes no weights"),
        (configured(words_of(4), config_groups=[1]), "config_groups must be an object"),
    ],
)  # fmt: skip
def test_inconsistent_tensors_are_rejected_on_open(tmp_path: Path, written: Written, error: str) -> None:
    with pytest.raises(ModelError, match=error):
        open_checkpoint(write(tmp_path, written))


@pytest.mark.parametrize(("case", "kind"), [("W8A8", "weight_scale"), ("W4A16", "weight_scale"), ("AWQ", "scales")])
def test_non_finite_scales_are_rejected_by_name(tmp_path: Path, case: str, kind: str) -> None:
    written = CASES[case][2]
    scales = written[1][kind].copy()
    scales.flat[3] = np.nan
    error = rf"model\.safetensors: tensor '{NAME}\.{kind}'.*not finite"
    folder = write(tmp_path, changed(written, kind, scales))
    with open_checkpoint(folder) as checkpoint, pytest.raises(ModelError, match=error):
        checkpoint.read(f"{NAME}.weight")


def test_unquantized_modules_stay_unquantized(tmp_path: Path) -> None:
    other = {"lm_head.weight": RNG.standard_normal((4, IN)).astype(np.float16)}
    for number, case in enumerate(("W8A8", "W4A16", "GPTQ")):
        with open_checkpoint(write(tmp_path / str(number), CASES[case][2], **other)) as checkpoint:
            assert checkpoint.read_weight("lm_head.weight", WEIGHT_FORMATS).dtype == "F16"  # type: ignore[union-attr]
