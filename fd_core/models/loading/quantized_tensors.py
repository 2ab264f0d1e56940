"""Quantized weights in safetensors: several stored tensors make one Hugging Face weight.

Supported are compressed-tensors (8-bit integers, and packed ones of 4 or 8 bits), GPTQ, AWQ, FP8, and MXFP4 of the
experts of gpt-oss. Shapes, types and group sizes are validated when the folder is opened; scales when a weight is read.

Sources: https://github.com/neuralmagic/compressed-tensors, https://github.com/AutoGPTQ/AutoGPTQ,
https://github.com/casper-hansen/AutoAWQ (WQLinear_GEMM), and the FP8 checkpoints of DeepSeek-V3 and vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fd_core.errors import ModelError
from fd_core.models.loading.checkpoint import TensorView
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.files import StoredTensor
from fd_core.ops.weights import (
    FP4_HALVES,
    FP8,
    MXFP4,
    RAW_TYPES,
    PackedTensor,
    RawTensor,
    Weight,
    mxfp4_scales,
    row_blocks,
)

_CODES: Final = {"I8": "i1", "U8": "u1", "I32": "<i4", "I64": "<i8", FP8: "u1", **RAW_TYPES}
_LARGEST_FP8_SCALE: Final = np.finfo(np.float32).max / 448
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each column within a word."""
_FORMS: Final = tuple(
    """
    dense int-quantized pack-quantized float-quantized naive-quantized mixed-precision
    """.split()
)
"""Values of `format`, which only compressed-tensors has."""
_NOT_WEIGHTS: Final = tuple(
    """
    input_scale input_scale_ub input_zero_point output_scale k_scale v_scale q_scale
    """.split()
)
"""Static scales of activations and KV, which are ignored: this engine computes dynamic ones per row and block,
and FP8 KV has none."""

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Places = npt.NDArray[np.intp]


def quantized_views(
    config: Mapping[str, Any], origin: str, tensors: Mapping[str, StoredTensor]
) -> dict[str, TensorView]:
    """Return the view of every weight by its stored name, composed of one or several tensors.

    `origin` is the config's file. Raises `ModelError` for unsupported methods and inconsistent tensors.
    """
    whole = ModelConfig(config, origin=origin)
    settings = whole.part("quantization_config") or whole.part("compression_config")
    if settings is None:
        return {name: TensorView(each.shape, each) for name, each in tensors.items()}
    method = settings.text("quant_method", "")
    if method not in _METHODS:
        raise ModelError(
            f"{origin}: weights quantized by {method[:40]!r} are not supported",
            hint=f"supported are {', '.join(_METHODS)} and GGUF; an unquantized model takes --quantization int8",
        )
    sparsity = settings.part("sparsity_config")
    for part, served in ((settings, _FORMS), (sparsity, ("dense",))):
        if part is not None and (form := part.text("format", "dense")) not in served:
            raise ModelError(
                f"{origin}: weights in the format {form[:40]!r} are not supported",
                hint=f"supported are {', '.join(_FORMS)}",
            )
    markers, view_of = _METHODS[method]
    pieces: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        pieces.setdefault(module, {})[kind] = tensor
    views: dict[str, TensorView] = {}
    for module, kinds in pieces.items():
        own = _Pieces(module, kinds, settings)
        if any(marker in kinds for marker in markers):
            found = view_of(own)
            of_module = {"weight": found} if isinstance(found, TensorView) else found
            views |= {f"{module}.{name}": view for name, view in of_module.items()}
        rest = {kind: each for kind, each in kinds.items() if kind not in own.taken and kind not in _NOT_WEIGHTS}
        views |= {f"{module}.{kind}" if module else kind: TensorView(each.shape, each) for kind, each in rest.items()}
    return views


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Stored tensors of one module, such as `model.layers.0.mlp.up_proj`."""

    module: str
    tensors: Mapping[str, StoredTensor]
    settings: ModelConfig
    """The content of `quantization_config`."""
    taken: set[str] = field(default_factory=set)

    def take(self, kind: str, dtypes: Collection[str]) -> StoredTensor:
        """Return a tensor of the module; `ModelError` if it is missing or of another type."""
        tensor = self.tensors.get(kind)
        if tensor is None:
            raise self.wrong(f"tensor '{self.module}.{kind}' is missing")
        if tensor.dtype not in dtypes:
            raise _wrong(tensor, f"is stored as {tensor.dtype}, expected {' or '.join(dtypes)}")
        self.taken.add(kind)
        return tensor

    def matrix(self, kind: str, dtypes: Collection[str]) -> StoredTensor:
        tensor = self.take(kind, dtypes)
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise _wrong(tensor, f"has shape {tensor.shape}, expected two dimensions")
        return tensor

    def shaped(self, kind: str, dtypes: Collection[str], *shapes: tuple[int, ...]) -> StoredTensor:
        """Return a tensor of the module that has one of the shapes."""
        tensor = self.take(kind, dtypes)
        if tensor.shape not in shapes:
            raise _wrong(tensor, f"has shape {tensor.shape}, expected {' or '.join(map(str, shapes))}")
        return tensor

    def wrong(self, what: str) -> ModelError:
        """Return a `ModelError` about the module, with the file of its first tensor."""
        return ModelError(f"{next(iter(self.tensors.values())).file.path}: {what}")

    def bits(self) -> int:
        bits = self.settings.count("bits")
        if bits not in (4, 8):
            raise ModelError(f"{self.settings.origin}: quantization_config.bits is {bits}; 4 and 8 are supported")
        return bits

    def groups(self, width: int) -> int:
        """Return the number of groups in a row of `width` values."""
        size = self.settings.values.get("group_size", -1)
        if size == -1:
            return 1
        size = self.settings.count("group_size")
        if width % size:
            raise self.wrong(f"'{self.module}' has rows of {width} values, not a multiple of group size {size}")
        return width // size

    def group_places(self, kind: str, width: int, groups: int) -> _Places | None:
        """Return the group of each column where GPTQ's `desc_act` mixes them, None where groups are contiguous."""
        if kind not in self.tensors:
            return None
        tensor = self.shaped(kind, ("I32",), (width,))
        places = tensor.view("<i4")
        if np.array_equal(places, np.arange(width) // (width // groups)):
            return None
        if places.min() < 0 or places.max() >= groups:
            raise _wrong(tensor, f"names groups that are not from 0 to {groups - 1}", hint="the file is damaged")
        return places.astype(np.intp)


def _wrong(tensor: StoredTensor, what: str, hint: str | None = None) -> ModelError:
    return ModelError(f"{tensor.file.path}: tensor {tensor.name!r} {what}", hint=hint)


def _array(tensor: StoredTensor) -> npt.NDArray[Any]:
    return tensor.view(_CODES[tensor.dtype])


def _scales(tensor: StoredTensor) -> _Floats:
    """Read scales; `ModelError` unless all are finite."""
    values = RawTensor(tensor.dtype, _array(tensor)).to_float32()
    if not np.isfinite(values).all():
        raise _wrong(tensor, "has scales that are not finite numbers", hint="the file is damaged")
    return values


def _unpacked(words: npt.NDArray[np.int32], bits: int) -> _Bytes:
    """Unpack the values of words, lowest bits first: [..., n] becomes [..., n * 32 / bits]."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed
    values = np.empty((*packed.shape[:-1], packed.shape[-1], 2), np.uint8)
    np.bitwise_and(packed, 15, out=values[..., 0])
    np.right_shift(packed, 4, out=values[..., 1])
    return values.reshape(*packed.shape[:-1], -1)


def _packed(
    form: str,
    bits: int,
    values: _Bytes,
    scales: _Floats,
    zeros: npt.NDArray[Any] | None,
    places: _Places | None = None,
) -> Weight:
    """Return (value - zero) * scale; values and zeros are unsigned, and None is a zero in the middle of the range.

    The result is packed unless `places` mix the columns of groups, for which there is no packed format.
    """
    middle = 1 << (bits - 1)
    if zeros is not None and (zeros == middle).all():
        zeros = None
    if places is not None:
        return RawTensor("F32", _mixed(values, scales, np.float32(middle) if zeros is None else zeros, places))
    if zeros is None or bits == 8:
        values = values - np.uint8(middle)  # wraps around, as in two's complement
    minima = None
    if zeros is not None:
        minima = -(zeros.astype(np.float32) - np.float32(middle if bits == 8 else 0)) * scales
    return PackedTensor(form, bits, np.ascontiguousarray(values).view(np.int8), np.ascontiguousarray(scales), minima)


def _mixed(values: _Bytes, scales: _Floats, zeros: Any, places: _Places) -> _Floats:
    """Return (value - zero) * scale in float32, where column `i` is of group `places[i]`."""
    zeros = np.broadcast_to(zeros, scales.shape)
    whole = np.empty(values.shape, np.float32)
    for rows in row_blocks(whole.shape, whole):
        whole[rows] = (values[rows] - zeros[rows][:, places].astype(np.float32)) * scales[rows][:, places]
    return whole


def _gptq(own: _Pieces) -> TensorView:
    """Return the view of a GPTQ weight: words pack values along the inputs; zeros are stored minus one, except in
    gptq_v2."""
    overrides = own.settings.part("dynamic")
    own_sizes = [] if overrides is None else [name for name in overrides.values if not name.startswith("-:")]
    if own_sizes:  # `-:` marks unquantized modules, which their tensors show
        raise ModelError(
            f"{own.settings.origin}: quantization_config.dynamic gives modules like {own_sizes[0][:80]!r} "
            "separate sizes, which is not supported",
            hint="use a version whose layers share bits and group_size",
        )
    bits = own.bits()
    a_word = 32 // bits
    words = own.matrix("qweight", ("I32",))
    width, out = words.shape[0] * a_word, words.shape[1]
    groups = own.groups(width)
    scales = own.shaped("scales", RAW_TYPES, (groups, out))
    zeros = own.shaped("qzeros", ("I32",), (groups, -(-out // a_word)))
    places = own.group_places("g_idx", width, groups)
    less = 0 if own.settings.text("checkpoint_format", "gptq") == "gptq_v2" else 1

    def read() -> Weight:
        found = (_unpacked(_array(zeros), bits)[:, :out] + np.uint8(less)) & np.uint8((1 << bits) - 1)
        return _packed("gptq", bits, _unpacked(_array(words).T, bits), _scales(scales).T, found.T, places)

    return TensorView((out, width), words, stored_format="gptq", joined=read)


def _awq(own: _Pieces) -> TensorView:
    version = own.settings.text("version", "gemm").lower()
    if own.bits() != 4 or version != "gemm":
        raise ModelError(
            f"{own.settings.origin}: AWQ weights of {own.bits()} bits in the format {version[:40]!r} are not supported",
            hint="supported are 4 bits in the format gemm",
        )
    words = own.matrix("qweight", ("I32",))
    width, out = words.shape[0], words.shape[1] * 8
    groups = own.groups(width)
    scales = own.shaped("scales", RAW_TYPES, (groups, out))
    zeros = own.shaped("qzeros", ("I32",), (groups, out // 8)) if own.settings.flag("zero_point", True) else None

    def columns(tensor: StoredTensor) -> _Bytes:
        values = _unpacked(_array(tensor), 4)
        return values.reshape(-1, 8)[:, _AWQ_ORDER].reshape(values.shape).T

    def read() -> Weight:
        return _packed("awq", 4, columns(words), _scales(scales).T, None if zeros is None else columns(zeros))

    return TensorView((out, width), words, stored_format="awq", joined=read)


def _mxfp4(own: _Pieces) -> dict[str, TensorView]:
    """Return the views of experts, such as `3.down_proj.weight`; the rows of gate and up alternate in one tensor."""
    views = {}
    for kind, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        blocks, bias = own.take(f"{kind}_blocks", ("U8",)), own.take(f"{kind}_bias", RAW_TYPES)
        if len(blocks.shape) != 4 or blocks.shape[3] != 16 or blocks.shape[1] % len(parts) or 0 in blocks.shape:
            raise _wrong(blocks, f"has shape {blocks.shape}, expected experts, rows, groups and 16 bytes of each")
        if bias.shape != blocks.shape[:2]:
            raise _wrong(bias, f"has shape {bias.shape}, expected {blocks.shape[:2]}")
        scales = own.shaped(f"{kind}_scales", ("U8",), blocks.shape[:3])
        for expert in range(blocks.shape[0]):
            for index, name in enumerate(parts):
                rows = expert, slice(index, None, len(parts))
                out, width = blocks.shape[1] // len(parts), 32 * blocks.shape[2]
                views[f"{expert}.{name}.weight"] = TensorView(
                    (out, width), blocks, stored_format=MXFP4, joined=partial(_fp4_rows, blocks, scales, rows)
                )
                views[f"{expert}.{name}.bias"] = TensorView((out,), bias, joined=partial(_rows, bias, rows))
    return views


def _rows(tensor: StoredTensor, rows: tuple[int, slice]) -> RawTensor:
    return RawTensor(tensor.dtype, _array(tensor)[rows])


def _fp4_rows(blocks: StoredTensor, scales: StoredTensor, rows: tuple[int, slice]) -> PackedTensor:
    codes, exponents = _unpacked(_array(blocks)[rows].reshape(-1, 16 * blocks.shape[2]), 4), _array(scales)[rows]
    if (exponents == 255).any():
        raise _wrong(scales, "has scales that are not finite numbers", hint="the file is damaged")
    return PackedTensor(MXFP4, 8, FP4_HALVES[codes], scales=mxfp4_scales(exponents))


def _fp8(own: _Pieces) -> TensorView:
    block = own.settings.values.get("weight_block_size")
    return _fp8_view(own, "weight_scale_inv" if "weight_scale_inv" in own.tensors else "weight_scale", block)


def _fp8_view(own: _Pieces, kind: str, block: object) -> TensorView:
    """Return the view of an FP8 weight, with one scale per tensor, row, or block of rows and columns."""
    weight = own.take("weight", (FP8, *RAW_TYPES))
    if weight.dtype != FP8 and kind not in own.tensors:
        return TensorView(weight.shape, weight)  # an unquantized weight
    weight = own.matrix("weight", (FP8,))
    out, width = weight.shape
    shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (out,), (out, 1)]
    rows, columns = 1, width
    if block is not None:
        if not isinstance(block, list) or len(block) != 2 or not all(type(each) is int and each > 0 for each in block):
            raise ModelError(
                f"{own.settings.origin}: expected two positive integers as the block size, got {str(block)[:40]}"
            )
        rows, columns = block
        shapes = [(-(-out // rows), -(-width // columns))]
    group = width if columns >= width else math.gcd(columns, width)
    scales = own.shaped(kind, RAW_TYPES, *shapes)

    def read() -> Weight:
        values, found = _array(weight), _scales(scales)
        if ((values & 127) == 127).any():
            raise _wrong(weight, "has values that are not finite numbers", hint="the file is damaged")
        if (np.abs(found) > _LARGEST_FP8_SCALE).any():
            raise _wrong(scales, "has scales that make values overflow", hint="the file is damaged")
        found = np.repeat(found.reshape(-1, found.shape[-1] if block else 1), rows, axis=0)[:out]
        found = np.repeat(found, columns // group, axis=1)[:, : width // group]
        whole = np.ascontiguousarray(np.broadcast_to(found, (out, width // group)))
        return PackedTensor(FP8, 8, values.view(np.int8), scales=whole)

    return TensorView((out, width), weight, stored_format=FP8, joined=read)


def _compressed_tensors(own: _Pieces) -> TensorView:
    """Return the view of a compressed-tensors weight: its tensors determine the format, the config's groups the
    sizes."""
    groups = own.settings.part("config_groups")
    parts = [groups.part(name) for name in groups.values] if groups is not None else []
    found = [part.part("weights") for part in parts if part is not None]
    schemes = [each for each in found if each is not None]
    if not schemes:
        raise ModelError(f"{own.settings.origin}: config_groups describes no weights")
    if "weight_packed" in own.tensors:
        return _packed_words(own, schemes)
    weight = own.take("weight", ("I8", FP8, *RAW_TYPES))
    if weight.dtype in RAW_TYPES and "weight_scale" not in own.tensors:
        return TensorView(weight.shape, weight)  # an unquantized weight
    if weight.dtype == FP8:
        blocks = [each.values["block_structure"] for each in schemes if each.values.get("block_structure") is not None]
        return _fp8_view(own, "weight_scale", blocks[0] if blocks else None)
    weight = own.matrix("weight", ("I8",))
    scales, zeros, places = _scales_and_zeros(own, schemes, weight.shape)

    def read() -> Weight:
        values = _array(weight).view(np.uint8) ^ np.uint8(128)
        return _packed("int8", 8, values, scales(), zeros and zeros(8), places)

    return TensorView(weight.shape, weight, stored_format="int8", joined=read)


def _packed_words(own: _Pieces, schemes: list[ModelConfig]) -> TensorView:
    """Return the view of packed words along the inputs; a separate tensor has the shape, as rows may end within a
    word."""
    words = own.matrix("weight_packed", ("I32",))
    out, width = (int(each) for each in _array(own.shaped("weight_shape", ("I64", "I32"), (2,))))
    bits = next((bits for bits in (4, 8) if words.shape == (out, -(-width * bits // 32))), None)
    if bits is None or bits not in {scheme.count("num_bits") for scheme in schemes}:
        raise _wrong(words, f"of shape {words.shape} does not match {out} rows of {width} values in 4 or 8 bits")
    scales, zeros, places = _scales_and_zeros(own, schemes, (out, width))

    def read() -> Weight:
        values = _unpacked(_array(words), bits)[:, :width]
        return _packed(f"int{bits}", bits, values, scales(), zeros and zeros(bits), places)

    return TensorView((out, width), words, stored_format=f"int{bits}", joined=read)


def _scales_and_zeros(
    own: _Pieces, schemes: list[ModelConfig], shape: tuple[int, ...]
) -> tuple[Callable[[], _Floats], Callable[[int], npt.NDArray[Any]] | None, _Places | None]:
    """Return readers of the scales [out, groups] and of the unsigned zeros, None for a symmetric scheme; and what
    `group_places` returns."""
    out, width = shape
    sizes = [size for each in schemes if (size := each.values.get("group_size")) not in (None, -1)]
    stored = own.take("weight_scale", RAW_TYPES)
    groups = stored.shape[1] if len(stored.shape) == 2 else 1
    if stored.shape not in ((), (1,), (1, 1), (out,), (out, groups)) or not groups:
        raise _wrong(stored, f"has shape {stored.shape}, which does not match {out} rows of {width} values")
    if groups > 1 and (width % groups or width // groups not in sizes):
        raise _wrong(stored, f"has {groups} scales for {width} values, not groups of {' or '.join(map(str, sizes))}")
    places = own.group_places("weight_g_idx", width, groups)

    def scales() -> _Floats:
        return np.broadcast_to(_scales(stored).reshape(-1, groups), (out, groups))

    if "weight_zero_point" not in own.tensors:
        return scales, None, places
    points = own.take("weight_zero_point", ("I32", "I8"))
    if points.dtype == "I8" and points.shape != stored.shape:
        raise _wrong(points, f"has shape {points.shape}, but its scales have shape {stored.shape}")
    if points.dtype == "I32" and points.shape not in [(-(-out * bits // 32), groups) for bits in (4, 8)]:
        raise _wrong(points, f"has shape {points.shape}, which does not match {out} rows of {groups} groups")

    def zeros(bits: int) -> npt.NDArray[Any]:
        if points.dtype == "I8":
            signed = _array(points).reshape(-1, groups).astype(np.int16)
            return np.broadcast_to(signed + (1 << (bits - 1)), (out, groups))
        return _unpacked(_array(points).T, bits)[:, :out].T

    return scales, zeros, places


_METHODS: Final[Mapping[str, tuple[tuple[str, ...], Callable[[_Pieces], TensorView | dict[str, TensorView]]]]] = {
    "compressed-tensors": (("weight_packed", "weight", "weight_scale"), _compressed_tensors),
    "gptq": (("qweight", "qzeros", "scales"), _gptq),
    "awq": (("qweight", "qzeros", "scales"), _awq),
    "fbgemm_fp8": (("weight", "weight_scale"), _fp8),
    "fp8": (("weight", "weight_scale", "weight_scale_inv"), _fp8),
    "mxfp4": (("gate_up_proj_blocks", "down_proj_blocks"), _mxfp4),
}
"""For each `quant_method`: the tensors that identify a weight, and the function that composes one, or the weights and
biases of experts by name."""
