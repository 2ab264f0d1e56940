"""Paged KV and attention in torch: gather each row's keys and values, then torch's fused attention."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from fd_core.ops.contract import SCALE_BYTES, Array, Heads, KVCache, KVShape, StepInput
from fd_core.types import IntArray

_HOST_DTYPES = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.float16: np.float16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}
_BITS = {each: torch.int16 if each == torch.bfloat16 else each for each in _HOST_DTYPES}
"""Torch dtypes and numpy dtypes of the same size."""
_STORED = {"int8": torch.int8, "fp8": torch.uint8}
"""By `KVShape.dtype`."""


class TorchLayer(NamedTuple):
    """One layer's keys and values, each [num_blocks * block_size, nkv, d], or int8 [..., d + 4] with scales.

    uint8 holds the bits of FP8.
    Of a latent cache, `keys` are the whole vectors, with two scales if quantized, and `values` their ends.
    """

    keys: Array
    values: Array
    block_size: int


class TorchKVCache(KVCache):
    """Keys and values as one tensor [layers, 2, num_blocks * block_size, nkv, d], or int8 [..., d + 4] with scales.

    Latent vectors as [layers, 1, num_blocks * block_size, 1, d], or int8 [..., d + 8]. uint8 holds the bits of FP8.
    """

    def __init__(self, shape: KVShape, num_blocks: int, dtype: Any, device: Any) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        layers, sides, block_size, *rest = shape.block_sizes
        sizes = (layers, sides, num_blocks * block_size, *rest)
        try:
            # Zeros, because attention multiplies masked values by 0, which does not suppress a NaN.
            self._data = torch.zeros(sizes, dtype=_STORED.get(shape.dtype, dtype), device=device)
        except RuntimeError as error:
            needed = shape.bytes_per_block(dtype.itemsize) * num_blocks
            raise MemoryError(f"not enough memory for a KV cache of {num_blocks} blocks ({needed} bytes)") from error
        end = shape.latent + (SCALE_BYTES if shape.quantized else 0)
        values = self._data[:, 0, ..., -end:] if shape.latent else self._data[:, 1]
        self._layers = [TorchLayer(*each, shape.block_size) for each in zip(self._data[:, 0], values, strict=True)]

    def layer(self, index: int) -> TorchLayer:
        return self._layers[index]

    @property
    def host_dtype(self) -> npt.DTypeLike:
        """The type of exported blocks."""
        return _HOST_DTYPES[self._data.dtype]

    def checked(self, blocks: IntArray, data: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return exported blocks unchanged. Raises `ValueError` if they do not match this cache."""
        wanted = (len(blocks), *self.shape.block_sizes)
        if data.dtype != self.host_dtype or data.shape != wanted:
            raise ValueError(
                f"got blocks of {data.dtype}{list(data.shape)}, expected {np.dtype(self.host_dtype)}{list(wanted)}"
            )
        return data

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks in canonical order; bfloat16 as uint16 bits."""
        copied = self._blocks()[:, :, self._index(blocks)].permute(2, 0, 1, 3, 4, 5).contiguous().cpu()
        values: npt.NDArray[Any] = copied.view(_BITS[copied.dtype]).numpy().view(_HOST_DTYPES[copied.dtype])
        return values

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        dtype, data = self._data.dtype, np.array(self.checked(blocks, data))
        bits = data.view(np.int16) if dtype == torch.bfloat16 else data
        values = torch.from_numpy(bits).view(dtype).to(self._data.device)
        self._blocks()[:, :, self._index(blocks)] = values.permute(1, 2, 0, 3, 4, 5)

    def _blocks(self) -> Array:
        return self._data.unflatten(2, (-1, self.shape.block_size))

    def _index(self, blocks: IntArray) -> Array:
        return torch.from_numpy(np.array(blocks, np.int64)).to(self._data.device)


def quantize_heads(x: Array, dtype: Any = torch.int8) -> Array:
    """Convert keys or values [T, nkv, d] for the cache: int8 [T, nkv, d + 4], or uint8 [T, nkv, d] with FP8 bits."""
    wide = x.float()
    if dtype == torch.uint8:  # without the clamp, some releases of torch store NaN
        return (wide.clamp(-448, 448) + wide * 0).to(torch.float8_e4m3fn).view(dtype)
    scale = wide.abs().amax(dim=-1, keepdim=True) / 127
    steps = (wide / torch.where(scale == 0, 1.0, scale)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((steps, scale.view(torch.int8)), dim=-1)


def _dequantize_heads(packed: Array, dtype: Any) -> Array:
    if packed.dtype == torch.uint8:
        return packed.view(torch.float8_e4m3fn).to(dtype)
    if packed.dtype == dtype:
        return packed
    scale = packed[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (packed[..., :-SCALE_BYTES] * scale).to(dtype)


def _dequantize_latents(packed: Array, latent: int, dtype: Any) -> Array:
    end = latent + (SCALE_BYTES if packed.dtype == torch.int8 else 0)
    return torch.cat([_dequantize_heads(part, dtype) for part in (packed[..., :-end], packed[..., -end:])], dim=-1)


@dataclass(frozen=True, slots=True)
class _TorchGroup:
    """Rows with the same number of tokens, computed together. n rows, Q tokens each, L keys at most."""

    tokens: Array | None
    """int64[n * Q], the step's tokens of these rows; None for all tokens in order."""
    kv_slots: Array
    """int64[n * L]"""
    masks: dict[tuple[int | None, bool, bool, Any], Array]
    """Mask [n, 1, Q, L] per window or chunk, direction and dtype, 0 if a token attends to a key, else -inf."""
    positions: Array
    """int64[n, Q, 1], of the tokens."""
    keys: Array
    """int64[L], positions of the keys."""
    absent: Array
    """bool[n, 1, L], True for places beyond the context of a row."""
    ends: Array
    """int64[n, Q, 1], the ends of the positions that the tokens attend to."""


class TorchAttentionPlan:
    """Attention inputs derived from a step's metadata, once for all layers."""

    def __init__(self, step: StepInput, block_size: int) -> None:
        self._groups: list[_TorchGroup] = []
        starts = step.query_start.tolist()
        contexts = step.context_len.tolist()
        by_count: defaultdict[int, list[int]] = defaultdict(list)
        for row in range(len(contexts)):
            by_count[starts[row + 1] - starts[row]].append(row)
        by_count.pop(0, None)
        for count, rows in by_count.items():
            self._groups.append(self._group(step, block_size, rows, count, max(contexts[row] for row in rows)))

    def _group(self, step: StepInput, block_size: int, rows: list[int], count: int, longest: int) -> _TorchGroup:
        device = step.positions.device
        everything = len(rows) == len(step.context_len)
        index = torch.tensor(rows, device=device)
        context = step.context_len.long()[index, None]
        place = torch.arange(longest, device=device)
        tables = step.block_tables.long()[index]
        slots = tables[:, place // block_size] * block_size + place % block_size
        # Places beyond a row's context read its last token: others may be NaN, which no weight of 0 hides.
        slots = torch.where(place < context, slots, slots.gather(1, context - 1))
        query = context - count + torch.arange(count, device=device)
        begins = step.query_start.long()[index, None]
        tokens = (begins + torch.arange(count, device=device)).flatten()
        return _TorchGroup(
            None if everything else tokens,
            slots.flatten(),
            masks={},
            positions=query[:, :, None],
            keys=place,
            absent=(place >= context)[:, None],
            ends=query[:, :, None] + 1 if step.ends is None else step.ends.long()[tokens].view(len(rows), count, 1),
        )

    def attend(self, q: Array, layer: TorchLayer, heads: Heads) -> Array:
        """Return the attention of q [T, nh, d] as [T, nh * d], or [T, nh * latent]."""
        if len(self._groups) == 1 and self._groups[0].tokens is None:
            return self._attend(q, layer, heads, group=self._groups[0])
        output = q.new_empty(len(q), heads.num_heads * (heads.latent or heads.head_dim))
        for group in self._groups:
            output[group.tokens] = self._attend(q[group.tokens], layer, heads, group=group)
        return output

    def _attend(self, q: Array, layer: TorchLayer, heads: Heads, group: _TorchGroup) -> Array:
        (n, count, _), longest = group.positions.shape, len(group.keys)
        shape = (n, longest, heads.num_kv_heads, -1)
        slots = group.kv_slots
        if heads.window is not None:  # blocks before the window may be those of others as well
            slots = slots.view(n, longest)
            slots = torch.where(group.keys >= heads.first_key(group.positions[:, 0]), slots, slots[:, -1:]).flatten()
        keys = layer.keys.index_select(0, slots)
        if heads.latent:
            keys = keys if keys.dtype == q.dtype else _dequantize_latents(keys, heads.latent, q.dtype)
            values = keys[..., -heads.latent :]
        else:
            values = layer.values.index_select(0, slots)
            keys, values = _dequantize_heads(keys, q.dtype), _dequantize_heads(values, q.dtype)
        keys, values = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
        # Query heads that share a KV head are folded into the token axis: [n, nkv, g * Q, d].
        grouped = q.reshape(n, count, heads.num_kv_heads, -1, heads.head_dim).permute(0, 2, 3, 1, 4)
        mask = self._mask(group, heads, q.dtype)
        folded = grouped.flatten(2, 3)
        mask = mask.repeat(1, 1, grouped.shape[2], 1) if mask.shape[2] > 1 else mask
        if heads.softcap is None and heads.sinks is None:
            result = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=heads.scale)
        else:
            scores = (folded @ keys.transpose(2, 3)).float() * heads.scale
            if heads.softcap is not None:
                scores = (scores / heads.softcap).tanh() * heads.softcap
            scores = scores + mask
            if heads.sinks is not None:
                sinks = heads.sinks.view(heads.num_kv_heads, -1).repeat_interleave(count, 1)[None, :, :, None]
                scores = torch.cat((scores, sinks.expand(n, -1, -1, -1)), dim=-1)
            result = scores.softmax(dim=-1)[..., :longest].to(q.dtype) @ values
        return result.unflatten(2, (-1, count)).permute(0, 3, 1, 2, 4).reshape(n * count, -1)

    def _mask(self, group: _TorchGroup, heads: Heads, dtype: Any) -> Array:
        key = heads.window, heads.chunked, heads.causal, dtype
        mask = group.masks.get(key)
        if mask is None:
            keys, positions = group.keys, group.positions
            later = keys >= group.ends if heads.causal else group.absent | (heads.first_key(keys) > positions)
            hidden = later | (keys < heads.first_key(positions))
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            mask = group.masks[key] = mask[:, None]
        return mask
