"""The torch pack: float32, bfloat16 or float16, eager. Needs no compiler; the reference for compiled packs."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from fd_core.ops.contract import (
    CLAMP,
    Activation,
    Array,
    Experts,
    Heads,
    HostStep,
    KVCache,
    KVShape,
    Norm,
    Ops,
    PlainActivation,
    Recurrent,
    Rope,
    StepInput,
)
from fd_core.ops.numpy.recurrence import StateBlocks, recur
from fd_core.ops.parallel import RankGroup, Stage
from fd_core.ops.torch.attention import TorchAttentionPlan, TorchKVCache, TorchLayer, quantize_heads
from fd_core.ops.torch.sampling import TorchSampling
from fd_core.ops.weights import WEIGHT_FORMATS, PackedTensor, RawTensor, Weight

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_torch(weight: Weight) -> Array:
    """Return a host tensor of the same dtype to copy from; it may be a read-only mapped file.

    A packed weight becomes float32.
    """
    if isinstance(weight, PackedTensor):
        return torch.from_numpy(weight.to_float32())
    data = np.require(weight.data, requirements="A")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if weight.dtype == "BF16":
            return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(data)


def widened(array: Array) -> Array:
    """Convert 16-bit floats to float32, which the host computes with; others are unchanged."""
    return array.float() if array.dtype in (torch.bfloat16, torch.float16) else array


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """A prepared linear: weight [out, in] and bias [out] in the pack's dtype."""

    weight: Array
    bias: Array | None


class TorchOps(TorchSampling, Ops):
    """Operations on torch tensors of one device.

    Only `to_host` and, once a step, the attention plan synchronize with the device.
    """

    name = "torch"
    framework = "torch"
    kv_dtypes: Collection[str] = ("int8", "fp8")
    encodes = True
    chunks = True
    any_experts = True
    latents = True
    biased_experts = True
    ungated_experts = True
    expert_parallel = True
    sinks = True
    recurs = True
    table_formats: Collection[str] = WEIGHT_FORMATS
    _group: RankGroup | None = None

    def __init__(self, dtype: str = "float32", device: str = "cpu") -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"expected a dtype of {', '.join(_DTYPES)}, got {dtype!r}")
        self.dtype = dtype
        self.device = torch.device(device)
        self._on_host = self.device.type == "cpu"
        self.torch_dtype = _DTYPES[dtype]
        self._planned: dict[int, tuple[StepInput, TorchAttentionPlan]] = {}
        """Of the last step, by group of layers."""

    def join(self, group: RankGroup) -> None:
        if self.device.type != "cpu":
            super().join(group)
        group.require_order()
        self.parallel, self._group = group.parallel, group

    def cut(self, stage: Stage) -> None:
        if self.device.type != "cpu":
            super().cut(stage)
        self.stage = stage

    def states_from_host(self, states: npt.NDArray[np.float32]) -> Array:
        """Upload states in their original dtype."""
        return torch.from_numpy(states).to(self.torch_dtype)

    def from_host(self, array: npt.NDArray[Any]) -> Array:
        """Share or copy a numpy array; uint64 becomes int64 with the same bits."""
        if array.dtype == np.uint64:
            array = array.view(np.int64)
        if not array.flags.writeable:  # torch does not support read-only memory
            array = array.copy()
        shared = torch.from_numpy(array)
        return shared if self._on_host else shared.to(self.device)

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """Share or copy a tensor; bfloat16 and float16 become float32."""
        host = widened(array)
        values: npt.NDArray[Any] = (host if self._on_host else host.cpu()).numpy()
        return values

    def prepare_vector(self, values: npt.NDArray[np.float32]) -> Array:
        return torch.from_numpy(np.array(values, np.float32)).to(self.device)

    def prepare_embedding(self, weight: Weight) -> Array:
        """Copy a table; a packed one stays packed, in host memory."""
        if isinstance(weight, PackedTensor):
            return weight.take_rows(np.arange(weight.shape[0]))
        return self._stack([weight])

    def prepare_linear(
        self, parts: Sequence[Weight], biases: Sequence[RawTensor] | None = None, *, gated: bool = False
    ) -> Any:
        return TorchLinear(self._stack(parts), None if biases is None else self._stack(biases))

    def tied_head(self, embedding: Array, weight: Weight, bias: RawTensor | None = None) -> Any:
        """Share the embedding unless one of both is packed."""
        if isinstance(weight, PackedTensor) or isinstance(embedding, PackedTensor):
            return super().tied_head(embedding, weight, bias)
        return TorchLinear(embedding, None if bias is None else self._stack([bias]))

    def _stack(self, parts: Sequence[Weight]) -> Array:
        rows = sum(part.shape[0] for part in parts)
        stacked = torch.empty((rows, *parts[0].shape[1:]), dtype=self.torch_dtype, device=self.device)
        start = 0
        for part in parts:
            for block in part.blocks():
                stacked[start : start + block.shape[0]].copy_(as_torch(block))
                start += block.shape[0]
        return stacked

    def allocate_kv(self, shape: KVShape, num_blocks: int) -> KVCache:
        return TorchKVCache(shape, num_blocks, self.torch_dtype, device=self.device)

    def embedding(self, table: Array, token_ids: Array, scale: float = 1.0, *, centred: bool = False) -> Array:
        """Look up rows. Rounds the scale to the pack's dtype, as the reference models do."""
        if isinstance(table, PackedTensor):
            rows = table.take_rows(token_ids.cpu().numpy())
            x = as_torch(rows).to(self.device, self.torch_dtype)
        else:
            x = functional.embedding(token_ids, table)
        x = x if scale == 1.0 else x * _rounded(scale, self.torch_dtype)
        return (x.float() - x.float().mean(dim=1, keepdim=True)).to(x.dtype) if centred else x

    def rms_norm(self, x: Array, norm: Norm) -> Array:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm.eps)
        return (wide * inverse * norm.weight).to(x.dtype)

    def layer_norm(self, x: Array, norm: Norm) -> Array:
        return functional.layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, norm.eps).to(x.dtype)

    def linear(self, x: Array, weight: Any) -> Array:
        return functional.linear(x, weight.weight, weight.bias)

    def gate(self, gate_up: Array, activation: Activation) -> Array:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "clamped_swiglu":
            return _activate(gate.clamp(max=CLAMP), "quick_gelu").mul_(up.clamp(-CLAMP, CLAMP).add_(1))
        return _activate(gate, activation).mul_(up)

    def activate(self, x: Array, activation: PlainActivation) -> Array:
        return _activate(x, activation)

    def split_heads(self, qkv: Array, heads: Heads) -> tuple[Array, Array, Array]:
        if heads.latent:
            rotated = heads.head_dim - heads.latent
            q, v, k = qkv.split([qkv.shape[1] - heads.head_dim, heads.latent, rotated], dim=1)
            return q, k[:, None], v[:, None]
        q, k, v = qkv.unflatten(-1, (-1, heads.head_dim)).split(
            [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1
        )
        return q, k, v

    def joint_norm(self, x: Array, norm: Norm, width: int) -> Array:
        wide = x.float()
        squares = self.all_reduce(wide.square().sum(dim=(1, 2), keepdim=True))
        return (wide * torch.rsqrt(squares / width + norm.eps) * norm.weight).to(x.dtype)

    def rope(self, x: Array, rope: Rope, positions: Array) -> Array:
        cos = rope.cos.index_select(0, positions)[:, None]
        sin = rope.sin.index_select(0, positions)[:, None]
        rotary = 2 * cos.shape[-1]
        turned = x[..., :rotary].float()
        if rope.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        turned = turned.to(x.dtype)
        return turned if rotary == x.shape[-1] else torch.cat((turned, x[..., rotary:]), dim=-1)

    def write_kv(self, layer: TorchLayer, k: Array, v: Array, kv_slots: Array) -> None:
        slots = kv_slots.long()
        if layer.keys.dtype != k.dtype:
            k, v = (quantize_heads(x, layer.keys.dtype) for x in (k, v))
        layer.keys[..., : k.shape[-1]].index_copy_(0, slots, k)
        layer.values.index_copy_(0, slots, v)

    def paged_attention(self, q: Array, layer: TorchLayer, heads: Heads, step: StepInput) -> Array:
        """Attend over gathered keys and values; the plan of a step is computed once for all layers."""
        planned = self._planned.get(step.group)
        if planned is None or planned[0] is not step:
            planned = self._planned[step.group] = step, TorchAttentionPlan(step, layer.block_size)
        return planned[1].attend(q, layer, heads)

    def prepare_heads(self, weight: npt.NDArray[np.float32]) -> Array:
        return self.prepare_vector(weight).to(self.torch_dtype)

    def absorb(self, q: Array, weight: Array, heads: Heads) -> Array:
        q, rotated = q.unflatten(1, (heads.num_heads, -1)).split(
            [weight.shape[2], heads.head_dim - heads.latent], dim=2
        )
        return torch.cat((rotated, _each_head(q, weight)), dim=2)

    def expand(self, x: Array, weight: Array, heads: Heads) -> Array:
        return _each_head(x.unflatten(1, (heads.num_heads, -1)), weight).flatten(1)

    def recur(self, x: Array, recurrent: Recurrent, layer: TorchLayer, step: StepInput) -> Array:
        """Compute on the host; states are in the memory of the cache."""
        given = {field.name: getattr(recurrent, field.name) for field in fields(recurrent)}
        given = {name: each.numpy() if isinstance(each, torch.Tensor) else each for name, each in given.items()}
        sides = [layer.keys] if layer.keys.shape != layer.values.shape else [layer.keys, layer.values]
        size = layer.block_size * layer.keys.shape[1] * layer.keys.shape[2] * layer.keys.itemsize
        blocks = StateBlocks([side.view(torch.uint8).numpy().reshape(-1, size) for side in sides], Recurrent(**given))
        host = HostStep(step.query_start.numpy(), step.context_len.numpy(), step.block_tables.numpy())
        y = recur(x.float().numpy(), Recurrent(**given), blocks, host, layer.block_size)
        return torch.from_numpy(y).to(x.dtype)

    def gate_heads(self, x: Array, gate: Array) -> Array:
        return x.mul_(gate.sigmoid_())

    def moe(self, x: Array, experts: Experts, activation: Activation) -> Array:
        chosen, weights = route(x, experts)
        # Indices of the [T, top_k] choices, grouped by expert; reading the group sizes synchronizes with the device.
        places = chosen.flatten().argsort(stable=True)
        sizes = torch.bincount(chosen.flatten(), minlength=len(experts.router)).tolist()
        output = torch.zeros_like(x)
        for expert, mine in enumerate(places.split(sizes), -experts.first):
            if 0 <= expert < len(experts.gate_up) and len(mine):
                tokens = mine // experts.top_k
                given, weight = x[tokens], weights.flatten()[mine, None].to(x.dtype)
                given = given * weight if experts.weighs_inputs else given
                y = self.expert(given, experts.gate_up[expert], experts.down[expert], experts, activation)
                output.index_add_(0, tokens, y if experts.weighs_inputs else y * weight)
        return self.add_shared(output, x, experts, activation)

    def weigh(self, y: Array, x: Array, gate: Array) -> Array:
        return y * torch.sigmoid(x.float() @ gate).to(y.dtype)[:, None]

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def all_reduce(self, x: Array) -> Array:
        """Sum over the ranks, in their order and in float32."""
        return x if self._group is None else torch.from_numpy(self._group.all_reduce(x.float().numpy())).to(x.dtype)

    def all_gather(self, x: Array) -> Array:
        return x if self._group is None else torch.from_numpy(self._group.all_gather(x.numpy()))

    def gather_rows(self, x: Array, rows: Array) -> Array:
        return x.index_select(0, rows)

    def logits_of(self, x: Array, head: Any, softcap: float | None) -> Array:
        logits = self.linear(x, head).float()
        return logits if softcap is None else (logits / softcap).tanh_().mul_(softcap)


def _each_head(x: Array, weight: Array) -> Array:
    """Multiply each head by its matrix: [T, nh, in], [nh, out, in] -> [T, nh, out]."""
    return (x.transpose(0, 1) @ weight.mT).transpose(0, 1)


def route(x: Array, experts: Experts) -> tuple[Array, Array]:
    """Return the chosen experts of each token int64[T, top_k] and their weights float32[T, top_k]."""
    products = functional.linear(x.float(), experts.router, experts.router_bias)
    scores = products.sigmoid() if experts.scoring == "sigmoid" else products.softmax(dim=-1)
    ranked = products if experts.correction_bias is None else scores + experts.correction_bias
    if experts.top_groups < experts.groups:
        ranked = _within_groups(ranked, experts)
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : experts.top_k]
    weights = scores.gather(1, chosen)
    if experts.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(experts.norm_floor)
    return chosen, weights if experts.weight_scale == 1.0 else weights * experts.weight_scale


def _within_groups(ranked: Array, experts: Experts) -> Array:
    """Exclude the experts outside each token's best groups: [T, experts] -> [T, experts]."""
    groups = ranked.unflatten(1, (experts.groups, -1))
    best = groups.topk(1 if experts.correction_bias is None else 2, dim=2).values.sum(dim=2)
    chosen = best.sort(dim=1, descending=True, stable=True).indices[:, : experts.top_groups]
    excluded = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
    return groups.masked_fill(excluded[..., None], -torch.inf).flatten(1)


@cache
def _rounded(number: float, dtype: Any) -> float:
    """Return a scalar rounded to a dtype; cached, because a graph capture must not create host tensors."""
    return float(torch.tensor(number, dtype=dtype))


def _activate(x: Array, activation: PlainActivation) -> Array:
    match activation:
        case "relu":
            return functional.relu(x)
        case "relu2":
            return functional.relu(x).square()
        case "quick_gelu":
            return x * (1.702 * x).sigmoid()
        case "silu":
            return functional.silu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "gelu":
            return functional.gelu(x)


@dataclass(frozen=True, slots=True)
class TorchInt8Linear:
    """A prepared linear with one scale per row."""

    weight: Array
    """int8[out, in] in the layout of oneDNN."""
    scales: Array
    """float32[out]"""
    bias: Array | None
    """float32[out]"""

    def __call__(self, x: Array) -> Array:
        """Multiply x [T, in], quantized to 8 bits row by row; rows that are not finite remain so."""
        wide = x.float()
        scale = wide.abs().amax(dim=1, keepdim=True) / 127
        values = wide.div_(scale.clamp_min(1e-30)) if wide is not x else wide / scale.clamp_min(1e-30)
        y = _product(values.round_().add_(128).to(torch.uint8), self.weight, self.scales).mul_(scale)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)


class TorchInt8Ops(TorchOps):
    """The pack on a CPU that `multiplies_bytes_exactly`: `int8` weights stay packed.

    oneDNN's int8 product, which torch ships for quantized models, accumulates integers exactly, so a row has the same
    bits alone and in any batch. Torch's other operations for packed weights are not used: those of 4 bits and the one
    that multiplies int8 by bfloat16 are slower than dequantized weights from about ten rows on (benchmarks/NOTES.md),
    and dynamic quantization of a whole batch would let one row change another.
    """

    weight_formats = frozenset({"int8"})

    def prepare_linear(
        self, parts: Sequence[Weight], biases: Sequence[RawTensor] | None = None, *, gated: bool = False
    ) -> Any:
        """Keep packed parts packed, unless a row has several scales or minima, or a part is not packed."""
        packed = [part for part in parts if isinstance(part, PackedTensor) and _fits(part)]
        if len(packed) < len(parts):
            return super().prepare_linear(parts, biases, gated=gated)
        # In the order of rows, which oneDNN assumes; parts of transposed files are not.
        values = torch.from_numpy(np.concatenate([part.values for part in packed])).contiguous()
        scales = torch.from_numpy(np.concatenate([part.scales[:, 0] for part in packed]))
        bias = None if biases is None else torch.from_numpy(np.concatenate([each.to_float32() for each in biases]))
        return TorchInt8Linear(torch.ops.onednn.qlinear_prepack(values, None), scales, bias)

    def linear(self, x: Array, weight: Any) -> Array:
        return weight(x) if isinstance(weight, TorchInt8Linear) else super().linear(x, weight)


def multiplies_bytes_exactly() -> bool:
    """Test the product, which saturates on CPUs without VNNI and is missing from some builds of torch."""
    weight = torch.full((32, 256), 127, dtype=torch.int8)
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        found = [_product(torch.full((rows, 256), 255, dtype=torch.uint8), packed, torch.ones(32)) for rows in (1, 64)]
    except (AttributeError, RuntimeError):
        return False
    return all(bool((each == 127 * 127 * 256).all()) for each in found)


def _fits(part: PackedTensor) -> bool:
    return part.format == "int8" and part.minima is None and part.scales.shape[1] == 1


def _product(x: Array, weight: Array, scales: Array) -> Array:
    """Return float32 (x - 128) @ weight * scales, of uint8 x."""
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 128, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
