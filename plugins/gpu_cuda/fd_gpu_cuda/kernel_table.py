"""Table of the pack's kernels, their compositions of torch operations, and adapter tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from fd_core.config import EngineConfig
from fd_core.ops.contract import SCALE_BYTES, Activation, Array, Experts, Heads, Recurrent, StepInput
from fd_core.ops.torch.attention import TorchLayer, quantize_heads
from fd_core.ops.torch.sampling import TorchSampling
from fd_core.runner.postprocess.torch_matrix import write_token_matrix
from torch.nn import functional

from fd_gpu_cuda.kv_cache import CudaLayer
from fd_gpu_cuda.packed import PackedPart, PackedProduct, in_order

_MOST_PARTS = 3
"""Queries, keys and values."""
_RANK_ALIGN = 16


class AdapterCapacity(NamedTuple):
    """Capacity of adapter tables: number of adapters and rank; growing needs a new table."""

    places: int = 8
    rank: int = 64

    @classmethod
    def of(cls, config: EngineConfig) -> AdapterCapacity | None:
        """Return the capacity by the settings; None without adapters."""
        if config.lora_modules or config.lora_folder is not None:
            return cls(config.max_loras, config.max_lora_rank)
        return None


@dataclass(frozen=True, slots=True)
class DeviceLora:
    """One adapter's term of a linear."""

    parts: tuple[tuple[Array, Array] | None, ...]
    """Down [rank, in] and scaled up [rank, out]; None for unchanged parts."""
    inputs: int
    outs: tuple[int, ...]


@dataclass(eq=False, slots=True)
class LoraTable:
    """Addresses of the matrices of one linear, by slot: they stay fixed while adapters are loaded and unloaded.

    Graphs read it, so it is only written between steps, in stream order.
    """

    entries: Array
    """int64[slots, parts, 3], for slots 1 and up: addresses of down and up, and the rank, 0 for none."""
    inputs: int
    outs: tuple[int, ...]
    width: int
    """Maximum rank, a multiple of 16."""
    held: list[DeviceLora | None] = field(default_factory=list)
    """Owners of the memory in the entries."""

    @classmethod
    def empty(
        cls,
        deltas: Sequence[DeviceLora | None],
        inputs: int,
        outs: tuple[int, ...],
        room: AdapterCapacity,
        device: torch.device,
    ) -> LoraTable:
        """Return an empty table with capacity for these adapters and for `room`."""
        if len(outs) > _MOST_PARTS:
            raise ValueError(f"adapters support at most {_MOST_PARTS} parts of a linear, got {len(outs)}")
        count, rank = max(room.places, len(deltas)), max(room.rank, _most_rank(deltas), 1)
        entries = torch.zeros((count, len(outs), 3), dtype=torch.int64, device=device)
        return cls(entries, inputs, outs, -(-rank // _RANK_ALIGN) * _RANK_ALIGN)

    def fits(self, deltas: Sequence[DeviceLora | None]) -> bool:
        """Return True if these adapters fit."""
        return len(deltas) <= len(self.entries) and _most_rank(deltas) <= self.width


def _most_rank(deltas: Sequence[DeviceLora | None]) -> int:
    parts = (part for delta in deltas if delta is not None for part in delta.parts if part is not None)
    return max((len(down) for down, _ in parts), default=0)


AttentionKernel = Callable[[Array, CudaLayer, Heads, StepInput], Array]
ExpertsKernel = Callable[[Array, Experts, Activation, Array | None], Array]
"""Mixture of stacked experts on x [T, H], plus an optional addend [T, H]."""
AddNorm = Callable[..., Array]
"""`kernels.norms.add_norm`: the norm of x [T, H] + post_norm(y), of all rows or of some."""


class SamplingKernels(TorchSampling):
    """Operations on logits and token ids, by default composed of torch operations."""

    def reserve(self, rows: int) -> None:
        """Allocate the workspace for up to `rows` rows; larger calls run in chunks."""

    def token_matrix(self, sampled: Array, accepted: Array, slots: Array, revoked: Array, num_slots: int) -> Array:
        """Return int32[num_slots, 1 + k], see `Postprocess.token_matrix`."""
        return write_token_matrix(sampled, accepted, slots, revoked, num_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One function per operation; unless noted, none synchronizes, and all may be captured.

    If an operation may be None, it is then composed of torch operations.
    """

    attention: AttentionKernel | None
    """Attention of any step, over keys and values in the pack's dtype or 8 bits."""
    sampling: SamplingKernels
    """All operations on logits and token ids."""
    packed_product: PackedProduct
    write_kv: Callable[[Array, Array, CudaLayer, Array], None] | None = None
    """`Ops.write_kv`."""
    add_norm: AddNorm | None = None
    """Fused deferred sums of the residual stream; None disables deferring."""
    rotate_and_store: AttentionKernel | None = None
    """Head norms, rope and KV write: qkv [T, (nh + 2 nkv) d] -> q [T, nh, d]."""
    gate: Callable[[Array, Activation], Array] | None = None
    """See `Ops.gate`."""
    experts: ExpertsKernel | None = None
    """`Ops.moe`; None runs every expert on every token of a decode."""
    lora: Callable[[Array, Array, LoraTable, Array], None] | None = None
    """Adds the adapters' terms of x to y, see `Ops.lora`, by each token's slot; None loops over adapters."""
    planned_attention: AttentionKernel | None = None
    """Attention of steps with metadata on the host; never captured, no 8-bit KV."""
    recur: Callable[[Array, Recurrent, CudaLayer, StepInput], Array] | None = None
    """`Ops.recur`; None loops over the tokens, and is never captured."""
    add_ranks: Callable[[Array], Array] | None = None
    """`fd_core.ops.torch.group.add_in_rank_order`."""

    @property
    def capturable(self) -> bool:
        """True if decodes may be captured: torch's composition of attention reads lengths on the host."""
        return self.attention is not None


def expanded(part: PackedPart) -> Array:
    """Dequantize a packed weight: float32[out, in]."""
    values = part.values if part.eight else in_order(part.values, part.bits)
    numbers = (values.view(torch.float8_e4m3fn) if part.fp8 else values).float() - part.middle
    numbers = numbers[:, : part.inputs]
    weight = numbers * part.scales.float().repeat_interleave(part.group, 1)
    if part.minima is not None:
        weight += part.minima.float().repeat_interleave(part.group, 1)
    return weight


def expanded_product(x: Array, part: PackedPart, y: Array) -> None:
    """Dequantize a packed weight, and multiply; may be captured."""
    weight = expanded(part).to(x.dtype)
    y.copy_(functional.linear(x, weight, None if part.bias is None else part.bias.to(x.dtype)))


def _bits(cache: Array) -> Array:
    """Return keys or values, FP8 as uint8, because few operations of torch take FP8."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def scatter_kv(k: Array, v: Array, layer: CudaLayer, kv_slots: Array) -> None:
    """Write k and v [T, nkv, d] to slots int32[T]; may be captured."""
    slots = kv_slots.long()
    for x, cache, scales in ((k, layer.keys, layer.key_scales), (v, layer.values, layer.value_scales)):
        if scales is None:
            bits = _bits(cache)
            bits.index_copy_(0, slots, x if bits is cache else quantize_heads(x, bits.dtype))
            continue
        packed = quantize_heads(x)
        cache.index_copy_(0, slots, packed[..., :-SCALE_BYTES])
        scales.index_copy_(0, slots, packed[..., -SCALE_BYTES:].contiguous().view(torch.float32).squeeze(-1))


def widened_layer(
    layer: CudaLayer, heads: Heads, step: StepInput, dtype: torch.dtype
) -> tuple[TorchLayer, Heads, StepInput]:
    """Return the arguments of the core's attention after queries: keys and values in `dtype`, and a step with their
    blocks.

    With 8 bits, only the blocks of the step are widened, which synchronizes with the device; likewise, the two parts of
    latent keys are joined.
    """
    if layer.keys.dtype == dtype and not heads.latent:
        return TorchLayer(layer.keys, layer.values, layer.block_size), heads, step
    size = layer.block_size
    # Entries beyond a context are undefined.
    named = step.block_tables.clamp(0, len(layer.keys) // size - 1)
    blocks, places = named.unique(return_inverse=True)
    slots = (blocks.long()[:, None] * size + torch.arange(size, device=blocks.device)).flatten()
    sides = (layer.keys, layer.key_scales), (layer.values, layer.value_scales)
    held = ((_bits(side)[slots].view(side.dtype), scales) for side, scales in sides)
    keys, values = (
        (side if scales is None else side.float() * scales[slots][..., None]).to(dtype) for side, scales in held
    )
    if heads.latent:
        keys = torch.cat((keys, values), dim=-1)
    return TorchLayer(keys, values, size), heads, replace(step, block_tables=places.int())
