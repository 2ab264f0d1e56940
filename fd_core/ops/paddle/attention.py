"""Paged KV and attention in Paddle: gather each row's keys and values, then two products and a softmax."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import Array, Heads, KVCache, KVShape, StepInput
from fd_core.ops.paddle.framework import paddle, tensor_of
from fd_core.types import IntArray


class PaddleLayer(NamedTuple):
    """One layer's keys and values, each [num_blocks * block_size, nkv, d]."""

    keys: Array
    values: Array
    block_size: int
    key_words: Array
    """The same memory as `words_of` sees it."""
    value_words: Array


def words_of(tensor: Array) -> Array:
    """Return float32 or bfloat16 [n, ...] as int32[n, words], a view where the tensor is contiguous.

    Every device moves rows of int32, but not every one scatters rows of bfloat16. A row must fill whole words.
    """
    return tensor.reshape([tensor.shape[0], -1]).view("int32")


class PaddleKVCache(KVCache):
    """Two tensors [num_blocks * block_size, nkv, d] a layer, in the pack's dtype."""

    def __init__(self, shape: KVShape, num_blocks: int, dtype: Any, place: Any) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self._place = place
        # Paddle's bfloat16 tensors are numpy's uint16 on the host, in both directions.
        self._host_dtype = np.dtype(np.uint16 if dtype == paddle.bfloat16 else np.float32)
        sizes = [num_blocks * shape.block_size, shape.num_kv_heads, shape.head_dim]
        try:
            # Zeros, because attention multiplies values it must not see by 0, which would not hide a NaN.
            flat = [paddle.zeros(sizes, dtype, device=place) for _ in range(2 * shape.num_layers)]
        except (MemoryError, RuntimeError) as error:
            needed = shape.bytes_per_block(self._host_dtype.itemsize) * num_blocks
            raise MemoryError(f"a KV cache of {num_blocks} blocks takes {needed} bytes, which do not fit") from error
        self._layers = [
            PaddleLayer(keys, values, shape.block_size, words_of(keys), words_of(values))
            for keys, values in zip(flat[::2], flat[1::2], strict=True)
        ]
        # Keys, values, keys, ...: the same memory, by block.
        self._blocks = [tensor.view([num_blocks, shape.block_size, *sizes[1:]]) for tensor in flat]

    def layer(self, index: int) -> PaddleLayer:
        """Return the layer's tensors."""
        return self._layers[index]

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks in canonical order; bfloat16 as uint16 bits."""
        index = self._index(blocks)
        copied = paddle.stack([paddle.index_select(tensor, index) for tensor in self._blocks], axis=1).numpy()
        exported: npt.NDArray[Any] = copied.reshape(len(blocks), self.shape.num_layers, 2, *copied.shape[2:])
        return exported

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Write exported blocks."""
        if data.dtype != self._host_dtype:
            raise ValueError(f"exported blocks are {data.dtype}, the cache holds {self._host_dtype}")
        index = self._index(blocks)
        values = data.reshape(len(blocks), len(self._blocks), *data.shape[3:])
        for place, tensor in enumerate(self._blocks):
            paddle.scatter_(words_of(tensor), index, words_of(tensor_of(values[:, place], self._place)))

    def _index(self, blocks: IntArray) -> Array:
        return tensor_of(np.asarray(blocks, np.int64), self._place)


class _PaddleGroup:
    """n rows with Q tokens each, computed together over L keys at most."""

    def __init__(
        self, step: tuple[IntArray, IntArray, IntArray], rows: IntArray, count: int, size: int, place: Any
    ) -> None:
        query_start, context_len, tables = step
        context = context_len[rows, None].astype(np.int64)
        keys = np.arange(context.max())
        slots = tables[rows][:, keys // size].astype(np.int64) * size + keys % size
        self.tokens = (query_start[rows, None] + np.arange(count)).reshape(-1)
        """[n * Q], where the rows' tokens are in the step."""
        self.kv_slots = tensor_of(np.where(keys < context, slots, 0).reshape(-1), place)
        """int64[n * L]"""
        self.distance = (context - count + np.arange(count))[:, :, None] - keys
        """[n, Q, L], how far a key lies before a token; negative if it is later."""
        self._place = place
        self._masks: dict[int | None, Array] = {}

    def mask(self, window: int | None) -> Array:
        """Return float32[n, 1, 1, Q, L]: 0 where a token sees a key and -inf elsewhere."""
        if window not in self._masks:
            hidden = self.distance < 0 if window is None else (self.distance < 0) | (self.distance >= window)
            mask = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None, None]
            self._masks[window] = tensor_of(mask, self._place)
        return self._masks[window]


class PaddleAttentionPlan:
    """What attention derives from a step's metadata, once for all layers; computed on the host."""

    def __init__(self, step: StepInput, block_size: int, place: Any) -> None:
        metadata = (step.query_start.numpy(), step.context_len.numpy(), step.block_tables.numpy())
        by_count: defaultdict[int, list[int]] = defaultdict(list)
        for row, count in enumerate(np.diff(metadata[0]).tolist()):
            by_count[count].append(row)
        by_count.pop(0, None)
        self._groups = [
            _PaddleGroup(metadata, np.array(rows, np.int32), count, block_size, place)
            for count, rows in by_count.items()
        ]
        self._tokens: list[Array] = []
        """For each of several groups its tokens; one group has them all, in order."""
        if len(self._groups) > 1:
            self._tokens = [tensor_of(group.tokens, place) for group in self._groups]
            order = np.concatenate([group.tokens for group in self._groups])
            self._back = tensor_of(np.argsort(order), place)
            """Where each token of the step is among the groups' tokens."""

    def attend(self, q: Array, layer: PaddleLayer, heads: Heads) -> Array:
        """Return the attention of q [T, nh, d] as [T, nh * d]."""
        if not self._tokens:
            return _attend(q, layer, heads, self._groups[0])
        outputs = [
            _attend(paddle.index_select(q, tokens), layer, heads, group)
            for tokens, group in zip(self._tokens, self._groups, strict=True)
        ]
        return paddle.index_select(paddle.concat(outputs), self._back)


def _attend(q: Array, layer: PaddleLayer, heads: Heads, group: _PaddleGroup) -> Array:
    n, count, longest = group.distance.shape
    # The query heads that share a KV head take the place of further tokens: [n, nkv, g * Q, d].
    grouped = q.reshape([n, count, heads.num_kv_heads, -1, heads.head_dim]).transpose([0, 2, 3, 1, 4])
    folded = grouped.reshape([n, heads.num_kv_heads, -1, heads.head_dim]) * heads.scale
    keys, values = (
        paddle.index_select(tensor, group.kv_slots)
        .reshape([n, longest, heads.num_kv_heads, heads.head_dim])
        .transpose([0, 2, 1, 3])
        for tensor in (layer.keys, layer.values)
    )
    scores = paddle.matmul(folded, keys, transpose_y=True).astype("float32")
    if heads.softcap is not None:
        scores = paddle.tanh(scores / heads.softcap) * heads.softcap
    scores = scores.reshape([n, heads.num_kv_heads, -1, count, longest]) + group.mask(heads.window)
    weights = paddle.nn.functional.softmax(scores, axis=-1).astype(q.dtype)
    result = paddle.matmul(weights.reshape([n, heads.num_kv_heads, -1, longest]), values)
    return result.reshape(grouped.shape).transpose([0, 3, 1, 2, 4]).reshape([n * count, -1])
