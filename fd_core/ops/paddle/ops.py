"""The Paddle pack: eager, for every device of Paddle; float32 on the CPU, also bfloat16 on other devices.

XPU, MetaX and others are Paddle devices: their backend is this class with a device name, plus overrides for
hardware-specific kernels.

Attention gathers each row's keys and values, then computes two products and a softmax, for as many queries at a time as
a fixed amount of memory allows. Sampling does not synchronize
with the device. Paddle does not promote integers and rejects an empty scatter, hence the casts and the checks of
shapes. Sums are int64: a weight is an integer, and devices without sums of float64 are common. Only the exponential is
float64, by element.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
    PenaltyInput,
    PlainActivation,
    Recurrent,
    Rope,
    SampleInput,
    StepInput,
)
from fd_core.ops.numpy.recurrence import StateBlocks, recur
from fd_core.ops.numpy.sampling import WEIGHT_ONE, rows_at_a_time
from fd_core.ops.paddle.framework import paddle, tensor_of
from fd_core.ops.philox import random_bits
from fd_core.ops.weights import RawTensor, Weight
from fd_core.types import IntArray


class PaddleLayer(NamedTuple):
    """One layer's keys and values, each [num_blocks * block_size, nkv, d]; the same tensor of a latent cache."""

    keys: Array
    values: Array
    block_size: int
    key_words: Array
    """The same memory as a view of `words_of`."""
    value_words: Array


def words_of(tensor: Array) -> Array:
    """Return float32 or bfloat16 [n, ...] as int32[n, words], a view where the tensor is contiguous.

    All devices scatter rows of int32, but not all support bfloat16. A row must be a multiple of a word.
    """
    return tensor.reshape([tensor.shape[0], -1]).view("int32")


class PaddleKVCache(KVCache):
    """Two tensors [num_blocks * block_size, nkv, d] a layer, or one of latent vectors, in the pack's dtype."""

    def __init__(self, shape: KVShape, num_blocks: int, dtype: Any, place: Any) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self._place = place
        # Paddle's bfloat16 tensors are numpy's uint16 on the host, in both directions.
        self._host_dtype = np.dtype(np.uint16 if dtype == paddle.bfloat16 else np.float32)
        sizes = [num_blocks * shape.block_size, shape.num_kv_heads, shape.head_dim]
        try:
            # Zeros, because attention multiplies masked values by 0, which does not suppress a NaN.
            sides = self.shape.block_sizes[1]
            flat = [paddle.zeros(sizes, dtype, device=place) for _ in range(sides * shape.num_layers)]
        except (MemoryError, RuntimeError) as error:
            needed = shape.bytes_per_block(self._host_dtype.itemsize) * num_blocks
            raise MemoryError(f"not enough memory for a KV cache of {num_blocks} blocks ({needed} bytes)") from error
        self._layers = [
            PaddleLayer(keys, values, shape.block_size, key_words=words_of(keys), value_words=words_of(values))
            for keys, values in zip(flat[::sides], flat[sides - 1 :: sides], strict=True)
        ]
        # Keys, values, keys, ...: the same memory, by block.
        self._blocks = [tensor.view([num_blocks, shape.block_size, *sizes[1:]]) for tensor in flat]

    def layer(self, index: int) -> PaddleLayer:
        return self._layers[index]

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks in canonical order; bfloat16 as uint16 bits."""
        index = self._index(blocks)
        copied = paddle.stack([paddle.index_select(tensor, index) for tensor in self._blocks], axis=1).numpy()
        exported: npt.NDArray[Any] = copied.reshape(len(blocks), *self.shape.block_sizes)
        return exported

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        if data.dtype != self._host_dtype:
            raise ValueError(f"expected blocks of {self._host_dtype}, got {data.dtype}")
        index = self._index(blocks)
        values = data.reshape(len(blocks), len(self._blocks), *data.shape[3:])
        for place, tensor in enumerate(self._blocks):
            paddle.scatter_(words_of(tensor), index, words_of(tensor_of(values[:, place], self._place)))

    def _index(self, blocks: IntArray) -> Array:
        return tensor_of(np.asarray(blocks, np.int64), self._place)


functional = paddle.nn.functional

_MOST_KEYS = 2**27
"""Elements of keys, and of values, that are gathered at a time if rows are computed together."""
_MOST_SCORES = 2**26
"""Scores that are in memory at a time: 256 MiB, and as much for each of the mask's sum, the softmax and its result."""
_HIDDEN = -1e30
"""Added to the score of a key that a token does not attend to; its weight is then exactly 0."""


def _on_host(step: StepInput) -> HostStep:
    return step.host or HostStep(step.query_start.numpy(), step.context_len.numpy(), step.block_tables.numpy())


class _PaddleGroup:
    """n rows with Q tokens each, computed together over L keys at most."""

    def __init__(
        self, step: HostStep, rows: IntArray, begins: IntArray, count: int, size: int, heads: Heads, place: Any
    ) -> None:
        """`begins` int64[N]: position at which the context of each row of the step begins."""
        context = step.context_len[rows, None].astype(np.int64)
        self.count, self.longest = count, int(context.max())
        # Places beyond a row's context read its last token: others may be NaN, which no weight of 0 hides.
        keys = np.minimum(np.arange(self.longest), context - 1)
        tables = np.take_along_axis(step.block_tables[rows], keys // size, axis=1).astype(np.int64)
        self.tokens = (step.query_start[rows, None] + np.arange(count)).reshape(-1)
        """[n * Q], indices of the rows' tokens in the step."""
        self.kv_slots = tensor_of((tables * size + keys % size).reshape(-1), place)
        """int64[n * L]"""
        positions, begin = context[:, :, None] - count + np.arange(count)[:, None], begins[rows, None, None]
        self._last = tensor_of(positions.astype(np.int32), place)
        """int32[n, Q, 1], the last key of each token: its own."""
        self._first: Array | None = None
        """The same of the first key; None without a window."""
        if heads.window is not None:
            self._first = tensor_of((heads.first_key(positions + begin) - begin).astype(np.int32), place)
        self._place = place
        self._mask: Array | None = None

    def mask(self, begin: int, end: int) -> Array:
        """Return float32[n, 1, 1, end - begin, L] for some tokens of each row: 0 if a token attends to a key, else a
        large negative number."""
        if self._mask is not None:
            return self._mask
        keys = paddle.arange(self.longest, dtype="int32", device=self._place)
        hidden = keys > self._last[:, begin:end]
        if self._first is not None:
            hidden = paddle.logical_or(hidden, keys < self._first[:, begin:end])
        mask = (hidden.astype("float32") * _HIDDEN).unsqueeze([1, 2])
        if end - begin == self.count:  # the other layers need the same
            self._mask = mask
        return mask


class PaddleAttentionPlan:
    """Attention inputs derived from a step's metadata, once for all layers of a group with a window; computed on the
    host."""

    def __init__(self, step: StepInput, layer: PaddleLayer, heads: Heads, place: Any) -> None:
        whole = _on_host(step)
        host = whole.within(heads, layer.block_size)
        begins = whole.context_len - host.context_len
        width = int(np.prod(layer.keys.shape[1:]))
        by_count: defaultdict[int, list[int]] = defaultdict(list)
        for row, count in enumerate(np.diff(host.query_start).tolist()):
            by_count[count].append(row)
        by_count.pop(0, None)
        self._groups = [
            _PaddleGroup(host, np.array(part, np.int32), begins, count, layer.block_size, heads, place)
            for count, rows in by_count.items()
            for part in _rows_at_a_time(rows, host.context_len, most=_MOST_KEYS // width)
        ]
        self._tokens: list[Array] = []
        """Tokens of each group; a single group has all, in order."""
        if len(self._groups) > 1:
            self._tokens = [tensor_of(group.tokens, place) for group in self._groups]
            order = np.concatenate([group.tokens for group in self._groups])
            self._back = tensor_of(np.argsort(order), place)
            """Index of each token of the step among the groups' tokens."""

    def attend(self, q: Array, layer: PaddleLayer, heads: Heads) -> Array:
        """Return the attention of q [T, nh, d] as [T, nh * d]."""
        if not self._tokens:
            return _attend(q, layer, heads, group=self._groups[0])
        outputs = [
            _attend(paddle.index_select(q, tokens), layer, heads, group=group)
            for tokens, group in zip(self._tokens, self._groups, strict=True)
        ]
        return paddle.index_select(paddle.concat(outputs), self._back)


def _rows_at_a_time(rows: list[int], context_len: IntArray, most: int) -> Iterator[list[int]]:
    """Yield rows of similar length whose padded contexts have at most `most` tokens; at least one at a time."""
    part: list[int] = []
    for row in sorted(rows, key=lambda row: int(context_len[row])):  # so the last one is the longest
        if part and (len(part) + 1) * int(context_len[row]) > most:
            yield sorted(part)
            part = []
        part.append(row)
    yield sorted(part)


def _attend(q: Array, layer: PaddleLayer, heads: Heads, group: _PaddleGroup) -> Array:
    longest, count = group.longest, group.count
    n = q.shape[0] // count
    # Query heads that share a KV head are folded into the token axis: [n, nkv, g * Q, d].
    grouped = q.reshape([n, count, heads.num_kv_heads, -1, heads.head_dim]).transpose([0, 2, 3, 1, 4]) * heads.scale
    keys, *rest = (
        paddle.index_select(tensor, group.kv_slots)
        .reshape([n, longest, heads.num_kv_heads, heads.head_dim])
        .transpose([0, 2, 1, 3])
        for tensor in ((layer.keys,) if heads.latent else (layer.keys, layer.values))
    )
    values = rest[0] if rest else keys[..., -heads.latent :]
    most = max(1, _MOST_SCORES // (n * heads.num_heads * longest))
    results = []
    for begin in range(0, count, most):
        end = min(begin + most, count)
        part = grouped if end - begin == count else grouped[:, :, :, begin:end]
        folded = part.reshape([n, heads.num_kv_heads, -1, heads.head_dim])
        scores = paddle.matmul(folded, keys, transpose_y=True).astype("float32")
        if heads.softcap is not None:
            scores = paddle.tanh(scores / heads.softcap) * heads.softcap
        scores = scores.reshape([n, heads.num_kv_heads, -1, end - begin, longest])
        scores += group.mask(begin, end)
        if heads.sinks is not None:
            sinks = heads.sinks.reshape([1, heads.num_kv_heads, -1, 1, 1]).expand([*scores.shape[:-1], 1])
            scores = paddle.concat([scores, sinks], axis=-1)
        weights = functional.softmax(scores, axis=-1)[..., :longest].astype(q.dtype)
        result = paddle.matmul(weights.reshape([n, heads.num_kv_heads, -1, longest]), values)
        results.append(result.reshape([*part.shape[:-1], -1]).transpose([0, 3, 1, 2, 4]))
    return (results[0] if len(results) == 1 else paddle.concat(results, axis=1)).reshape([n * count, -1])


_SHARE_ONE = 2.0**40
"""Weight of the most likely token when probabilities are summed; truncation to integers loses less than 1e-6 in
total."""
_INFINITY = 0x7F800000
"""Bits of float32's infinity, and the number of positive float32 values up to it."""


def _penalize(logits: Array, rows: Array, counts: Array, repetition: Array, presence: Array, frequency: Array) -> None:
    """Penalize some rows, of which `counts` [n, V] are the counts with drafts."""
    values = paddle.index_select(logits, rows)
    changed = paddle.where(values > 0, values / repetition, values * repetition)
    values = paddle.where(counts != 0, changed, values)
    generated = counts // 2
    added = generated.astype("float64") * frequency + (generated > 0).astype("float64") * presence
    paddle.scatter_(logits, rows, values - added.astype("float32"))


def _filtered_by_sorting(logits: Array, weights: Array, rows: SampleInput) -> Array:
    """Return the weights int64[R, V] with 0 for the tokens that top_k, top_p or min_p drop."""
    order = _by_logit(logits)
    ranks = paddle.arange(logits.shape[1], dtype="int64", device=logits.place)
    kept = paddle.take_along_axis(weights, order, axis=1)
    kept = kept * (ranks < _limits(logits, rows)).astype("int64")
    before = paddle.cumsum(kept, axis=1) - kept
    kept = kept * ((before < _mass(kept, rows)) | (ranks == 0)).astype("int64")
    return paddle.put_along_axis(paddle.zeros_like(weights), order, _without_unlikely(kept, rows), axis=1)


def _filtered_by_search(logits: Array, weights: Array, rows: SampleInput) -> Array:
    """Compute the same for a device that cannot sort a vocabulary."""
    ids = paddle.arange(logits.shape[1], dtype="int64", device=logits.place)
    first = ids == paddle.argmax(logits, axis=1).unsqueeze(1)
    kept = weights * _leading(logits, paddle.ones_like(weights), _limits(logits, rows)).astype("int64")
    kept = kept * (_leading(logits, kept, _mass(kept, rows)) | first).astype("int64")
    return _without_unlikely(kept, rows)


def _limits(logits: Array, rows: SampleInput) -> Array:
    """Return int64[R, 1], the number of tokens that top_k keeps."""
    vocab = paddle.full_like(rows.top_k, logits.shape[1])
    return paddle.where(rows.top_k > 0, rows.top_k, vocab).astype("int64").unsqueeze(1)


def _mass(kept: Array, rows: SampleInput) -> Array:
    """Return int64[R, 1]: top_p keeps a token if the weights before it sum to less than this."""
    return paddle.ceil(kept.sum(axis=1).astype("float64") * rows.top_p.astype("float64")).astype("int64").unsqueeze(1)


def _without_unlikely(kept: Array, rows: SampleInput) -> Array:
    """Return the weights with 0 for the tokens that min_p drops."""
    least = paddle.ceil(rows.min_p.astype("float64") * WEIGHT_ONE).astype("int64")
    return kept * (kept >= least.unsqueeze(1)).astype("int64")


def _leading(logits: Array, weights: Array, limits: Array) -> Array:
    """Return bool[R, V]: the tokens before which the weights int64[R, V] sum to less than `limits` int64[R, 1].

    Tokens are ordered by decreasing logit, then by id.
    """
    # Binary search over all float32 values for the smallest one above which the weights sum to less than the limit.
    below = paddle.full_like(limits, -_INFINITY - 1)
    for bit in reversed(range(32)):
        place = below + 2**bit
        above = ((logits > _number_at(place)).astype("int64") * weights).sum(axis=1, keepdim=True)
        below = paddle.where(above < limits, below, place)
    number = _number_at(below + 1)
    greater, equal = logits > number, logits == number
    tied = equal.astype("int64") * weights
    before = (greater.astype("int64") * weights).sum(axis=1, keepdim=True) + paddle.cumsum(tied, axis=1) - tied
    return greater | (equal & (before < limits))


def _number_at(places: Array) -> Array:
    """Return the float32 values at indices int64 in their total order; 0 has index 0."""
    negative = places < 0
    numbers = paddle.where(negative, -places, places).clip(max=_INFINITY).astype("int32").view("float32")
    return paddle.where(negative, -numbers, numbers)


def _by_logit(logits: Array) -> Array:
    """Return the token ids int64[R, V] by decreasing logit, the lower id first on a tie."""
    return paddle.argsort(logits, axis=1, descending=True, stable=True)


def _likeliest(logits: Array, count: int, longest_sort: int | None) -> Array:
    """Return the first `count` of them; in chunks if the device cannot sort all."""
    vocab = logits.shape[1]
    if longest_sort is None or vocab <= longest_sort:
        return _by_logit(logits)[:, :count]
    begins = range(0, vocab, longest_sort)
    parts = [_by_logit(logits[:, begin : begin + longest_sort])[:, :count] + begin for begin in begins]
    ids = paddle.concat(parts, axis=1)
    best = _likeliest(paddle.take_along_axis(logits, ids, axis=1), count, longest_sort)
    return paddle.take_along_axis(ids, best, axis=1)


_DTYPES = {"float32": paddle.float32, "bfloat16": paddle.bfloat16}


@dataclass(frozen=True, slots=True)
class PaddleLinear:
    """A prepared linear: weight [out, in] and bias [out] in the pack's dtype."""

    weight: Array
    bias: Array | None


class PaddleOps(Ops):
    """Operations on Paddle tensors of one device; the device becomes the process's.

    `device` is Paddle's name, such as `cpu`, `gpu`, `xpu` or that of a custom device, `metax_gpu`. Selecting an absent
    GPU crashes the process, so check first. Only `to_host`, the experts' sizes and, for a step that was not built on
    the host, the attention plan synchronize with the device. `longest_sort` is the maximum number of entries that the
    device sorts at once, None for no limit; with a limit, filters search for their thresholds instead of sorting the
    vocabulary.
    """

    name = "paddle"
    framework = "paddle"
    chunks = True
    any_experts = True
    latents = True
    biased_experts = True
    ungated_experts = True
    sinks = True
    recurs = True

    def __init__(self, dtype: str = "float32", device: str = "cpu", longest_sort: int | None = None) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"expected a dtype of {', '.join(_DTYPES)}, got {dtype!r}")
        if dtype != "float32" and device == "cpu":
            raise ValueError(f"Paddle does not multiply {dtype} matrices on a CPU; use float32")
        self.dtype = dtype
        self.device = device
        self.longest_sort = longest_sort
        self.place = paddle.set_device(device)
        self.paddle_dtype = _DTYPES[dtype]
        self._planned: dict[tuple[int, int | None, bool], tuple[StepInput, PaddleAttentionPlan]] = {}
        """Of the last step, by group of layers, window and whether it is the size of chunks."""

    def from_host(self, array: npt.NDArray[Any]) -> Array:
        return tensor_of(array.view(np.int64) if array.dtype == np.uint64 else array, self.place)

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = (array.astype("float32") if array.dtype == paddle.bfloat16 else array).numpy()
        return values

    def prepare_vector(self, values: npt.NDArray[np.float32]) -> Array:
        return self.from_host(np.asarray(values, np.float32))

    def prepare_embedding(self, weight: Weight) -> Array:
        return self._stack([weight])

    def prepare_linear(
        self, parts: Sequence[Weight], biases: Sequence[RawTensor] | None = None, *, gated: bool = False
    ) -> Any:
        return PaddleLinear(self._stack(parts), None if biases is None else self._stack(biases))

    def tied_head(self, embedding: Array, weight: Weight, bias: RawTensor | None = None) -> Any:
        """Share the embedding; a pack with another format of linear weights overrides this as well."""
        return PaddleLinear(embedding, None if bias is None else self._stack([bias]))

    def _stack(self, parts: Sequence[Weight]) -> Array:
        tensors = [self.from_host(part.to_float32()).astype(self.paddle_dtype) for part in parts]
        return tensors[0] if len(tensors) == 1 else paddle.concat(tensors)

    def allocate_kv(self, shape: KVShape, num_blocks: int) -> KVCache:
        return PaddleKVCache(shape, num_blocks, self.paddle_dtype, place=self.place)

    def embedding(self, table: Array, token_ids: Array, scale: float = 1.0, *, centred: bool = False) -> Array:
        """Look up rows. Rounds the scale to the pack's dtype, as the reference models do."""
        x = functional.embedding(token_ids, table)
        x = x if scale == 1.0 else x * paddle.full([], scale, self.paddle_dtype, device=self.place)
        if not centred:
            return x
        wide = x.astype("float32")
        return (wide - wide.mean(axis=1, keepdim=True)).astype(x.dtype)

    def rms_norm(self, x: Array, norm: Norm) -> Array:
        wide = x.astype("float32")
        inverse = paddle.rsqrt(wide.square().mean(axis=-1, keepdim=True) + norm.eps)
        return (wide * inverse * norm.weight).astype(x.dtype)

    def linear(self, x: Array, weight: Any) -> Array:
        y = paddle.matmul(x, weight.weight, transpose_y=True)
        return y if weight.bias is None else y + weight.bias

    def gate(self, gate_up: Array, activation: Activation) -> Array:
        if activation == "silu":
            return functional.swiglu(gate_up)
        gate, up = paddle.chunk(gate_up, 2, axis=-1)
        if activation == "clamped_swiglu":
            return self.activate(gate.clip(max=CLAMP), "quick_gelu") * (up.clip(-CLAMP, CLAMP) + 1)
        return functional.gelu(gate, approximate=activation == "gelu_tanh") * up

    def activate(self, x: Array, activation: PlainActivation) -> Array:
        match activation:
            case "relu":
                return _relu(x)
            case "relu2":
                return _relu(x).square()
            case "silu":
                return functional.silu(x)
            case "quick_gelu":
                return x * functional.sigmoid(1.702 * x)
            case "gelu" | "gelu_tanh":
                return functional.gelu(x, approximate=activation == "gelu_tanh")

    def split_heads(self, qkv: Array, heads: Heads) -> tuple[Array, Array, Array]:
        if heads.latent:
            sizes = [qkv.shape[1] - heads.head_dim, heads.latent, heads.head_dim - heads.latent]
            q, v, k = paddle.split(qkv, sizes, axis=1)
            return q, k.unsqueeze(1), v.unsqueeze(1)
        split = qkv.reshape([qkv.shape[0], -1, heads.head_dim])
        q, k, v = paddle.split(split, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], axis=1)
        return q, k, v

    def joint_norm(self, x: Array, norm: Norm, width: int) -> Array:
        wide = x.astype("float32")
        squares = self.all_reduce(wide.square().sum(axis=[1, 2], keepdim=True))
        return (wide * paddle.rsqrt(squares / width + norm.eps) * norm.weight).astype(x.dtype)

    def rope(self, x: Array, rope: Rope, positions: Array) -> Array:
        cos = paddle.index_select(rope.cos, positions).unsqueeze(1)
        sin = paddle.index_select(rope.sin, positions).unsqueeze(1)
        rotary = 2 * cos.shape[-1]
        wide = x[..., :rotary].astype("float32")
        if rope.interleaved:
            a, b = wide[..., 0::2], wide[..., 1::2]
            turned = paddle.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(wide.shape)
        else:
            a, b = paddle.chunk(wide, 2, axis=-1)
            turned = paddle.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)
        turned = turned.astype(x.dtype)
        return turned if rotary == x.shape[-1] else paddle.concat([turned, x[..., rotary:]], axis=-1)

    def write_kv(self, layer: PaddleLayer, k: Array, v: Array, kv_slots: Array) -> None:
        """Scatter keys and values to their slots as words, because not all devices scatter bfloat16."""
        if layer.keys is layer.values:
            paddle.scatter_(layer.key_words, kv_slots, words_of(paddle.concat([k, v], axis=-1)))
            return
        paddle.scatter_(layer.key_words, kv_slots, words_of(k))
        paddle.scatter_(layer.value_words, kv_slots, words_of(v))

    def paged_attention(self, q: Array, layer: PaddleLayer, heads: Heads, step: StepInput) -> Array:
        """Attend over gathered keys and values; layers with the same table and window share the plan of a step."""
        key = step.group, heads.window, heads.chunked
        planned = self._planned.get(key)
        if planned is None or planned[0] is not step:
            plan = PaddleAttentionPlan(step, layer, heads, self.place)
            planned = self._planned[key] = step, plan
        return planned[1].attend(q, layer, heads)

    def prepare_heads(self, weight: npt.NDArray[np.float32]) -> Array:
        return self.prepare_vector(weight).astype(self.paddle_dtype)

    def absorb(self, q: Array, weight: Array, heads: Heads) -> Array:
        q = q.reshape([q.shape[0], heads.num_heads, -1])
        q, rotated = paddle.split(q, [weight.shape[2], heads.head_dim - heads.latent], axis=2)
        return paddle.concat([rotated, _each_head(q, weight)], axis=2)

    def expand(self, x: Array, weight: Array, heads: Heads) -> Array:
        return _each_head(x.reshape([x.shape[0], heads.num_heads, -1]), weight).flatten(1)

    def recur(self, x: Array, recurrent: Recurrent, layer: PaddleLayer, step: StepInput) -> Array:
        """Compute on the host, where the blocks of the states are copied to, and from there back."""
        given = {field.name: getattr(recurrent, field.name) for field in fields(recurrent)}
        given = {name: each.numpy() if isinstance(each, paddle.Tensor) else each for name, each in given.items()}
        host, size = _on_host(step), layer.block_size
        first = np.maximum(host.context_len - np.diff(host.query_start) - 1, 0) // size
        entries = np.arange(host.block_tables.shape[1])
        needed = (first[:, None] <= entries) & (entries * size < host.context_len[:, None])
        used = np.unique(host.block_tables[needed])
        tables = np.searchsorted(used, np.where(needed, host.block_tables, used[0])).astype(np.int32)
        index = tensor_of(used.astype(np.int64), self.place)
        sides = [layer.keys] if layer.keys is layer.values else [layer.keys, layer.values]
        stored = [words_of(side.view([-1, size, *side.shape[1:]])) for side in sides]
        copies = [paddle.index_select(words, index).numpy() for words in stored]
        blocks = StateBlocks([copy.view(np.uint8) for copy in copies], Recurrent(**given))
        moved = HostStep(host.query_start, host.context_len, tables)
        y = recur(x.astype("float32").numpy(), Recurrent(**given), blocks, moved, size)
        for words, copy in zip(stored, copies, strict=True):
            paddle.scatter_(words, index, tensor_of(copy, self.place))
        return tensor_of(y, self.place).astype(self.paddle_dtype)

    def gate_heads(self, x: Array, gate: Array) -> Array:
        return x * functional.sigmoid(gate)

    def moe(self, x: Array, experts: Experts, activation: Activation) -> Array:
        most = len(x) if self.longest_sort is None else self.longest_sort // experts.top_k
        if len(x) > most:
            parts = [x[begin : begin + most] for begin in range(0, len(x), most)]
            return paddle.concat([self.moe(part, experts, activation) for part in parts])
        chosen, weights = _route(x, experts)
        # Indices of the [T, top_k] choices, grouped by expert; reading the group sizes synchronizes with the device.
        places = paddle.argsort(chosen.flatten(), stable=True)
        tokens = places // experts.top_k
        inputs = paddle.index_select(x, tokens)
        shares = paddle.index_select(weights.flatten(), places).unsqueeze(1).astype(x.dtype)
        ends = paddle.bincount(chosen.flatten(), minlength=len(experts.gate_up)).numpy().cumsum().tolist()
        output = paddle.zeros_like(x)
        for expert, (start, end) in enumerate(pairwise([0, *ends])):
            if start < end:
                given = inputs[start:end] * shares[start:end] if experts.weighs_inputs else inputs[start:end]
                y = self.expert(given, experts.gate_up[expert], experts.down[expert], experts, activation)
                paddle.index_add_(output, tokens[start:end], 0, y if experts.weighs_inputs else y * shares[start:end])
        return self.add_shared(output, x, experts, activation)

    def weigh(self, y: Array, x: Array, gate: Array) -> Array:
        return y * functional.sigmoid(paddle.matmul(x.astype("float32"), gate)).astype(y.dtype).unsqueeze(1)

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def gather_rows(self, x: Array, rows: Array) -> Array:
        return paddle.index_select(x, rows)

    def logits_of(self, x: Array, head: Any, softcap: float | None) -> Array:
        logits = self.linear(x, head).astype("float32")
        return logits if softcap is None else paddle.tanh(logits / softcap) * softcap

    def sample(self, logits: Array, rows: SampleInput) -> tuple[Array, Array]:
        likeliest = paddle.argmax(logits, axis=1)
        peaks = logits.max(axis=1)
        if rows.all_greedy:
            return likeliest.astype("int32"), peaks
        greedy = rows.temperature == 0.0
        temperature = paddle.where(greedy, paddle.ones_like(rows.temperature), rows.temperature).astype("float64")
        scores = (logits.astype("float64") - peaks.astype("float64").unsqueeze(1)) / temperature.unsqueeze(1)
        weights = paddle.round(paddle.exp(scores) * WEIGHT_ONE).astype("int64")
        if rows.any_filter:
            filtered = _filtered_by_sorting if self.longest_sort is None else _filtered_by_search
            weights = filtered(logits, weights, rows)
        cumulative = paddle.cumsum(weights, axis=1)
        uniform = random_bits(rows.seeds, rows.positions.astype("int64")).astype("float64") * 2.0**-24
        threshold = (uniform * cumulative[:, -1].astype("float64")).astype("int64")  # an integer exceeds both or none
        drawn = (cumulative <= threshold.unsqueeze(1)).astype("int64").sum(axis=1)
        drawn = drawn.clip(max=logits.shape[1] - 1)  # a row that is not finite
        return paddle.where(greedy, likeliest, drawn).astype("int32"), peaks

    def add_at(self, x: Array, rows: Array, ids: Array, values: Array) -> Array:
        return paddle.index_put_(x, (rows, ids), values, accumulate=True) if rows.shape[0] else x

    def write_rows(self, x: Array, rows: Array, values: Array) -> Array:
        return paddle.scatter_(x, rows, values) if rows.shape[0] else x

    def penalize(self, logits: Array, penalties: PenaltyInput) -> Array:
        if penalties.rows.shape[0] == 0:
            return logits
        counts = paddle.index_select(penalties.counts, penalties.counts_rows)
        twos = paddle.full_like(penalties.draft_ids, 2)
        counts = self.add_at(counts, penalties.draft_rows, penalties.draft_ids, twos)
        added = (each.astype("float64") for each in (penalties.presence, penalties.frequency))
        columns = [each.unsqueeze(1) for each in (penalties.repetition, *added)]
        group = rows_at_a_time(logits.shape[1], on_host=logits.place.is_cpu_place())
        for begin in range(0, counts.shape[0], group):
            part = slice(begin, begin + group)
            _penalize(logits, penalties.rows[part], counts[part], *(column[part] for column in columns))
        return logits

    def mask_logits(self, logits: Array, rows: Array, bits: Array) -> Array:
        vocab = logits.shape[1]
        # Bit j of a word is set if the remainder of a division by 2^(j + 1) is 2^j or more: XPU has no integer shifts.
        powers = paddle.cumprod(paddle.full_like(paddle.arange(32, dtype="int64", device=logits.place), 2), dim=0)
        group = rows_at_a_time(vocab, on_host=logits.place.is_cpu_place())
        for begin in range(0, rows.shape[0], group):
            part = slice(begin, begin + group)
            words = bits[part].astype("int64").unsqueeze(2)
            words = paddle.where(words < 0, words + 2**32, words)
            allowed = (words % powers * 2 >= powers).flatten(1)[:, :vocab]
            values = paddle.index_select(logits, rows[part])
            values = paddle.where(allowed, values, paddle.full_like(values, -math.inf))
            paddle.scatter_(logits, rows[part], values)
        return logits

    def logprobs(self, logits: Array, tokens: Array, top_n: int) -> tuple[Array, Array, Array]:
        # Paddle's `logsumexp` sums sequentially in float32: over 140,000 tokens its error is 4e-4.
        peaks = logits.max(axis=1, keepdim=True)
        shares = (paddle.exp(logits - peaks) * _SHARE_ONE).astype("int64")
        total = shares.sum(axis=1, keepdim=True).astype("float32") / _SHARE_ONE
        logarithms = logits - peaks - paddle.log(total)
        chosen = paddle.take_along_axis(logarithms, tokens.astype("int64").unsqueeze(1), axis=1)[:, 0]
        top_ids = _likeliest(logits, top_n, self.longest_sort)
        return chosen, top_ids.astype("int32"), paddle.take_along_axis(logarithms, top_ids, axis=1)

    def ranks(self, logits: Array, tokens: Array) -> Array:
        own = paddle.take_along_axis(logits, tokens.astype("int64").unsqueeze(1), axis=1)
        ids = paddle.arange(logits.shape[1], dtype="int32", device=logits.place)
        before = paddle.logical_and(logits == own, ids < tokens.unsqueeze(1))
        return paddle.logical_or(logits > own, before).astype("int32").sum(axis=1).astype("int32") + 1

    def verify(self, sampled: Array, drafts: Array, num_drafts: Array) -> Array:
        k = drafts.shape[1]
        places = paddle.arange(k, dtype="int32", device=drafts.place)
        right = (sampled[:, :k] == drafts) & (places < num_drafts.unsqueeze(1))
        return paddle.cumprod(right.astype("int32"), dim=1).sum(axis=1).astype("int32")


def _relu(x: Array) -> Array:
    """Paddle's own turns NaN into 0 on a CPU."""
    return paddle.where(x < 0, paddle.zeros_like(x), x)


def _each_head(x: Array, weight: Array) -> Array:
    """Multiply each head by its matrix: [T, nh, in], [nh, out, in] -> [T, nh, out]."""
    return paddle.matmul(x.transpose([1, 0, 2]), weight, transpose_y=True).transpose([1, 0, 2])


def _route(x: Array, experts: Experts) -> tuple[Array, Array]:
    """Return the chosen experts of each token int64[T, top_k] and their weights float32[T, top_k]."""
    products = paddle.matmul(x.astype("float32"), experts.router, transpose_y=True)
    if experts.router_bias is not None:
        products += experts.router_bias
    scores = functional.sigmoid(products) if experts.scoring == "sigmoid" else functional.softmax(products, axis=-1)
    # Scores of large products round to 1, but differ.
    ranked = products if experts.correction_bias is None else scores + experts.correction_bias
    if experts.top_groups < experts.groups:
        ranked = _within_groups(ranked, experts)
    chosen = paddle.argsort(ranked, axis=-1, descending=True, stable=True)[:, : experts.top_k]
    weights = paddle.take_along_axis(scores, chosen, axis=1)
    if experts.normalize:
        weights = weights / weights.sum(axis=-1, keepdim=True).clip(min=experts.norm_floor)
    return chosen, weights if experts.weight_scale == 1.0 else weights * experts.weight_scale


def _within_groups(ranked: Array, experts: Experts) -> Array:
    """Exclude the experts outside each token's best groups: [T, experts] -> [T, experts]."""
    groups = ranked.reshape([len(ranked), experts.groups, ranked.shape[1] // experts.groups])
    best = paddle.topk(groups, 1 if experts.correction_bias is None else 2, axis=2)[0].sum(axis=2)
    chosen = paddle.argsort(best, axis=1, descending=True, stable=True)[:, : experts.top_groups]
    excluded = paddle.put_along_axis(paddle.full_like(best, -math.inf), chosen, 0.0, axis=1)
    return (groups + excluded.unsqueeze(2)).flatten(1)
