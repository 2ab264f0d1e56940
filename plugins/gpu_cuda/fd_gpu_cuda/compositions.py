"""Operations composed of torch's own, for tables without a kernel: slow, and what kernels are compared with."""

from __future__ import annotations

from dataclasses import replace

import torch
from fd_core.ops.contract import SCALE_BYTES, Array, Heads, StepInput
from fd_core.ops.torch.attention import TorchLayer, quantize_heads
from torch.nn import functional

from fd_gpu_cuda.kv_cache import CudaLayer
from fd_gpu_cuda.packed import PackedPart


def expanded(part: PackedPart) -> Array:
    """Return what a packed weight stands for: float32[out, in]."""
    values = part.values
    if part.fp8:
        numbers = values.view(torch.float8_e4m3fn).float()
    elif part.bits == 4:
        spans = values.unflatten(1, (-1, part.span))
        numbers = torch.stack((spans & 15, spans >> 4), dim=2).flatten(1).float() - part.middle
    else:
        numbers = values.float()
    numbers = numbers[:, : part.inputs]
    weight = numbers * part.scales.float().repeat_interleave(part.group, 1)
    if part.minima is not None:
        weight += part.minima.float().repeat_interleave(part.group, 1)
    return weight


def expanded_product(x: Array, part: PackedPart, y: Array) -> None:
    """Expand a packed weight, and multiply; may be captured."""
    weight = expanded(part).to(x.dtype)
    y.copy_(functional.linear(x, weight, None if part.bias is None else part.bias.to(x.dtype)))


def scatter_kv(k: Array, v: Array, layer: CudaLayer, kv_slots: Array) -> None:
    """Write k and v [T, nkv, d] to slots int32[T]; may be captured."""
    slots = kv_slots.long()
    for x, cache, scales in ((k, layer.keys, layer.key_scales), (v, layer.values, layer.value_scales)):
        if scales is None:
            cache.index_copy_(0, slots, x)
            continue
        packed = quantize_heads(x)
        cache.index_copy_(0, slots, packed[..., :-SCALE_BYTES])
        scales.index_copy_(0, slots, packed[..., -SCALE_BYTES:].contiguous().view(torch.float32).squeeze(-1))


def widened_layer(
    layer: CudaLayer, heads: Heads, step: StepInput, dtype: torch.dtype
) -> tuple[TorchLayer, Heads, StepInput]:
    """Return what the core's attention takes behind queries: keys and values in `dtype`, and a step with their blocks.

    Of 8 bits only the blocks that the step names are widened, and finding them waits for the device.
    """
    if layer.key_scales is None or layer.value_scales is None:
        return TorchLayer(layer.keys, layer.values, layer.block_size), heads, step
    size = layer.block_size
    # Entries beyond a context mean nothing.
    named = step.block_tables.clamp(0, len(layer.keys) // size - 1)
    blocks, places = named.unique(return_inverse=True)
    slots = (blocks.long()[:, None] * size + torch.arange(size, device=blocks.device)).flatten()
    sides = ((layer.keys, layer.key_scales), (layer.values, layer.value_scales))
    keys, values = ((side[slots].float() * scales[slots][..., None]).to(dtype) for side, scales in sides)
    return TorchLayer(keys, values, size), heads, replace(step, block_tables=places.int())
