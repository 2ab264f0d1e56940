"""The numpy pack: float32, simple rather than fast, the reference for all other packs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import (
    CLAMP,
    KV_TYPES,
    Activation,
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
from fd_core.ops.numpy.kv_8bit import dequantize_kv, dequantize_latent, quantize_kv, quantize_latent
from fd_core.ops.numpy.recurrence import StateBlocks, recur
from fd_core.ops.numpy.sampling import NumpySampling
from fd_core.ops.parallel import RankGroup, Stage
from fd_core.ops.weights import WEIGHT_FORMATS, PackedTensor, RawTensor, Weight
from fd_core.types import IntArray

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NumpyLinear:
    """A prepared linear: weight [out, in] and bias [out]."""

    weight: Floats
    bias: Floats | None


class NumpyKVCache(KVCache):
    """Keys and values as float32[layers, 2, num_blocks, block_size, nkv, d], int8[..., d + 4] with scales, or FP8 bits.

    Latent vectors as float32[layers, 1, num_blocks, block_size, 1, d], int8[..., d + 8], or FP8 bits.
    """

    def __init__(self, shape: KVShape, num_blocks: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        layers, sides, *rest = shape.block_sizes
        self._data = np.zeros((layers, sides, num_blocks, *rest), KV_TYPES.get(shape.dtype, np.float32))

    def layer(self, index: int) -> npt.NDArray[Any]:
        """Return the layer's array, from the second axis on."""
        layer: npt.NDArray[Any] = self._data[index]
        return layer

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        return np.ascontiguousarray(self._data.transpose(2, 0, 1, 3, 4, 5)[blocks])

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        if data.dtype != self._data.dtype:
            raise ValueError(f"expected blocks of {self._data.dtype}, got {data.dtype}")
        self._data[:, :, blocks] = data.transpose(1, 2, 0, 3, 4, 5)


class NumpyOps(NumpySampling, Ops):
    """Operations on numpy arrays; activations, weights and KV are float32, the KV also int8 or FP8."""

    name = "numpy"
    framework = "numpy"
    dtype = "float32"
    on_host = True
    encodes = True
    chunks = True
    any_experts = True
    biased_experts = True
    ungated_experts = True
    expert_parallel = True
    sinks = True
    weight_formats = WEIGHT_FORMATS
    table_formats = WEIGHT_FORMATS
    dequantizes_weights = True
    kv_dtypes: Collection[str] = ("int8", "fp8")
    latents = True
    recurs = True
    _group: RankGroup | None = None

    def join(self, group: RankGroup) -> None:
        group.require_order()
        self.parallel, self._group = group.parallel, group

    def cut(self, stage: Stage) -> None:
        self.stage = stage

    def from_host(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def to_host(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def prepare_vector(self, values: npt.NDArray[np.float32]) -> Floats:
        return np.array(values, np.float32)

    def prepare_embedding(self, weight: Weight) -> Any:
        """Copy a table; a packed one stays packed."""
        if isinstance(weight, PackedTensor):
            return weight.take_rows(np.arange(weight.shape[0]))
        return np.array(weight.to_float32())

    def prepare_linear(
        self, parts: Sequence[Weight], biases: Sequence[RawTensor] | None = None, *, gated: bool = False
    ) -> Any:
        """Stack the parts in order; packed ones are dequantized."""
        weight = np.concatenate([part.to_float32() for part in parts])
        bias = None if biases is None else np.concatenate([part.to_float32() for part in biases])
        return NumpyLinear(weight, bias)

    def tied_head(self, embedding: Any, weight: Weight, bias: RawTensor | None = None) -> Any:
        """Share the embedding unless one of both is packed."""
        if isinstance(weight, PackedTensor) or isinstance(embedding, PackedTensor):
            return self.prepare_linear([weight], None if bias is None else [bias])
        return NumpyLinear(embedding, None if bias is None else bias.to_float32())

    def allocate_kv(self, shape: KVShape, num_blocks: int) -> KVCache:
        return NumpyKVCache(shape, num_blocks)

    def embedding(self, table: Any, token_ids: IntArray, scale: float = 1.0, *, centred: bool = False) -> Floats:
        rows = table.take_rows(token_ids).to_float32() if isinstance(table, PackedTensor) else table[token_ids]
        x: Floats = rows * np.float32(scale)
        return x - x.mean(axis=1, keepdims=True) if centred else x

    def rms_norm(self, x: Floats, norm: Norm) -> Floats:
        mean_square = np.square(x).mean(axis=-1, keepdims=True)
        normalized: Floats = x / np.sqrt(mean_square + np.float32(norm.eps)) * norm.weight
        return normalized

    def layer_norm(self, x: Floats, norm: Norm) -> Floats:
        normalized: Floats = self.rms_norm(x - x.mean(axis=-1, keepdims=True), norm) + np.asarray(norm.bias)
        return normalized

    def linear(self, x: Floats, weight: Any) -> Floats:
        y: Floats = x @ weight.weight.T
        return y if weight.bias is None else y + weight.bias

    def gate(self, gate_up: Floats, activation: Activation) -> Floats:
        gate, up = np.split(gate_up, 2, axis=-1)
        if activation == "clamped_swiglu":
            cap = np.float32(CLAMP)
            return _activate(np.minimum(gate, cap), "quick_gelu") * (np.clip(up, -cap, cap) + np.float32(1))
        return _activate(gate, activation) * up

    def activate(self, x: Floats, activation: PlainActivation) -> Floats:
        return _activate(x, activation)

    def split_heads(self, qkv: Floats, heads: Heads) -> tuple[Floats, Floats, Floats]:
        if heads.latent:
            q, kv = np.split(qkv, [qkv.shape[1] - heads.head_dim], axis=1)
            return q, kv[:, None, heads.latent :], kv[:, None, : heads.latent]
        split = qkv.reshape(len(qkv), -1, heads.head_dim)
        q_end, k_end = heads.num_heads, heads.num_heads + heads.num_kv_heads
        return split[:, :q_end], split[:, q_end:k_end], split[:, k_end:]

    def joint_norm(self, x: Floats, norm: Norm, width: int) -> Floats:
        squares = self.all_reduce(np.square(x).sum(axis=(1, 2), keepdims=True))
        normalized: Floats = x / np.sqrt(squares / np.float32(width) + np.float32(norm.eps)) * norm.weight
        return normalized

    def rope(self, x: Floats, rope: Rope, positions: IntArray) -> Floats:
        cos, sin = rope.cos[positions][:, None], rope.sin[positions][:, None]
        half = cos.shape[-1]
        first, second = (
            (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if rope.interleaved else (slice(half), slice(half, 2 * half))
        )
        a, b = x[..., first], x[..., second]
        rotated = x.copy()
        rotated[..., first] = a * cos - b * sin
        rotated[..., second] = b * cos + a * sin
        return rotated

    def write_kv(self, layer: npt.NDArray[Any], k: Floats, v: Floats, kv_slots: IntArray) -> None:
        blocks, offsets = np.divmod(kv_slots, layer.shape[2])
        dtype = next((name for name, each in KV_TYPES.items() if each == layer.dtype), "auto")
        if len(layer) == 1:
            layer[0, blocks, offsets] = quantize_latent(k, v, dtype)
            return
        for side, x in enumerate((k, v)):
            layer[side, blocks, offsets] = quantize_kv(x, dtype)

    def paged_attention(self, q: Floats, layer: npt.NDArray[Any], heads: Heads, step: StepInput) -> Floats:
        output = np.empty((len(q), heads.num_heads * (heads.latent or heads.head_dim)), np.float32)
        block_size = layer.shape[2]
        for row, context in enumerate(step.context_len.tolist()):
            tokens = slice(int(step.query_start[row]), int(step.query_start[row + 1]))
            # Blocks before the window may be those of others, whose NaN no weight of 0 hides.
            first = max(0, heads.first_key(context - (tokens.stop - tokens.start)))
            blocks = step.block_tables[row, first // block_size : -(-context // block_size)]
            held = layer[:, blocks].reshape(len(layer), -1, heads.num_kv_heads, layer.shape[-1])
            held = held[:, first % block_size :][:, : context - first]
            if heads.latent:
                k = dequantize_latent(held[0], heads.latent)
                v = k[..., -heads.latent :]
            else:
                k, v = dequantize_kv(held)
            ends = None if step.ends is None else step.ends[tokens, None]
            output[tokens] = _attend(q[tokens], k, v, heads=heads, first=first, ends=ends)
        return output

    def prepare_heads(self, weight: npt.NDArray[np.float32]) -> Any:
        return self.prepare_vector(weight)

    def absorb(self, q: Floats, weight: Any, heads: Heads) -> Floats:
        q = q.reshape(len(q), heads.num_heads, -1)
        absorbed = np.einsum("thn,hln->thl", q[..., : weight.shape[2]], weight, optimize=True)
        return np.concatenate([q[..., weight.shape[2] :], absorbed], axis=-1)

    def expand(self, x: Floats, weight: Any, heads: Heads) -> Floats:
        x = x.reshape(len(x), heads.num_heads, heads.latent)
        expanded: Floats = np.einsum("thl,hvl->thv", x, weight, optimize=True).reshape(len(x), -1)
        return expanded

    def recur(self, x: Floats, recurrent: Recurrent, layer: npt.NDArray[Any], step: StepInput) -> Floats:
        sides = [side.reshape(len(side), -1).view(np.uint8) for side in layer]
        host = HostStep(step.query_start, step.context_len, step.block_tables)
        return recur(x, recurrent, StateBlocks(sides, recurrent), host, layer.shape[2])

    def gate_heads(self, x: Floats, gate: Floats) -> Floats:
        gated: Floats = x * (np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * gate)))
        return gated

    def moe(self, x: Floats, experts: Experts, activation: Activation) -> Floats:
        chosen, weights = _route(x, experts)
        output = np.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True), experts.first):
            tokens, places = np.nonzero(chosen == expert)
            if len(tokens):
                given, weight = x[tokens], weights[tokens, places, None]
                given = given * weight if experts.weighs_inputs else given
                y = self.expert(given, gate_up, down, experts, activation)
                output[tokens] += y if experts.weighs_inputs else y * weight
        shared: Floats = self.add_shared(output, x, experts, activation)
        return shared

    def weigh(self, y: Floats, x: Floats, gate: Floats) -> Floats:
        weighted: Floats = y / (1 + np.exp(-(x @ gate)))[:, None]
        return weighted

    def add(self, x: Floats, y: Floats) -> Floats:
        return x + y

    def gather_rows(self, x: npt.NDArray[Any], rows: IntArray) -> npt.NDArray[Any]:
        return x[rows]

    def all_reduce(self, x: Floats) -> Floats:
        return x if self._group is None else self._group.all_reduce(x)

    def all_gather(self, x: Floats) -> Floats:
        return x if self._group is None else self._group.all_gather(x)

    def logits_of(self, x: Floats, head: Any, softcap: float | None) -> Floats:
        logits = self.linear(x, head)
        return logits if softcap is None else _softcap(logits, softcap)


def _attend(q: Floats, k: Floats, v: Floats, heads: Heads, first: int, ends: IntArray | None) -> Floats:
    """Attend the last len(q) tokens of one row: q [Q, nh, d], k and v [L, nkv, d or latent] -> [Q, nh * d or latent].

    `first` is the position of the first key; `ends` [Q, 1] are those of `StepInput`.
    """
    count, keys = len(q), np.arange(first, first + len(k))
    grouped = q.reshape(count, heads.num_kv_heads, -1, heads.head_dim).transpose(1, 2, 0, 3)
    scores = grouped @ k.transpose(1, 2, 0)[:, None] * np.float32(heads.scale)
    if heads.softcap is not None:
        scores = _softcap(scores, heads.softcap)
    positions = keys[len(k) - count :, None]
    if heads.causal:
        later = keys > positions if ends is None else keys >= ends
    else:
        later = heads.first_key(keys) > positions
    scores[..., later | (keys < heads.first_key(positions))] = -np.inf
    peaks = scores.max(axis=-1, keepdims=True)
    if heads.sinks is not None:
        sinks = heads.sinks.reshape(heads.num_kv_heads, -1, 1, 1)
        peaks = np.maximum(peaks, sinks)
    scores = np.exp(scores - peaks)
    total = scores.sum(axis=-1, keepdims=True)
    scores /= total if heads.sinks is None else total + np.exp(sinks - peaks)
    output: Floats = (scores @ v.swapaxes(0, 1)[:, None]).transpose(2, 0, 1, 3).reshape(count, -1)
    return output


def _route(x: Floats, experts: Experts) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return the chosen experts of each token and their weights, both [T, top_k]."""
    products = x @ experts.router.T
    if experts.router_bias is not None:
        products += experts.router_bias
    if experts.scoring == "sigmoid":
        scores = np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * products))  # cannot overflow
    else:
        scores = np.exp(products - products.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    # Scores of large products round to 1, but differ.
    ranked = products if experts.correction_bias is None else scores + experts.correction_bias
    if experts.top_groups < experts.groups:
        ranked = _within_groups(ranked, experts)
    chosen = np.argsort(-ranked, axis=1, kind="stable")[:, : experts.top_k]
    weights = np.take_along_axis(scores, chosen, axis=1)
    if experts.normalize:
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), np.float32(experts.norm_floor))
    return chosen, weights * np.float32(experts.weight_scale)


def _within_groups(ranked: Floats, experts: Experts) -> Floats:
    """Exclude the experts outside each token's best groups: [T, experts] -> [T, experts]."""
    groups = ranked.reshape(len(ranked), experts.groups, ranked.shape[1] // experts.groups)
    best = np.sort(groups, axis=2)[..., -1 if experts.correction_bias is None else -2 :].sum(axis=2)
    excluded = np.argsort(-best, axis=1, kind="stable")[:, experts.top_groups :, None]
    within = groups.copy()
    np.put_along_axis(within, excluded, -np.inf, axis=1)
    return within.reshape(ranked.shape)


def _softcap(x: Floats, cap: float) -> Floats:
    capped: Floats = np.tanh(x / np.float32(cap)) * np.float32(cap)
    return capped


def _activate(x: Floats, activation: PlainActivation) -> Floats:
    # Each is x times half of `doubled`; this form of the sigmoid cannot overflow.
    match activation:
        case "relu":
            return np.maximum(x, np.float32(0))
        case "relu2":
            return np.square(np.maximum(x, np.float32(0)))
        case "quick_gelu":
            doubled = 1 + np.tanh(x * np.float32(0.851))
        case "silu":
            doubled = 1 + np.tanh(x * np.float32(0.5))
        case "gelu_tanh":
            doubled = 1 + np.tanh(np.float32(math.sqrt(2.0 / math.pi)) * (x + np.float32(0.044715) * x**3))
        case "gelu":
            doubled = 1 + np.vectorize(math.erf, otypes=[np.float32])(x * np.float32(math.sqrt(0.5)))
    activated: Floats = x * (np.float32(0.5) * doubled)
    return activated
