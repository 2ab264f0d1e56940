"""KV on the device, and copies to and from the host in parallel with steps, through fixed staging memory.

Two lanes alternate. A lane is a stream with its own staging memory, on the device and, pinned, on the host, whose work
runs in order. So while one lane transfers blocks over the bus, the other one gathers or scatters its own, and the host
accesses a lane's memory only after its queued work is complete.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from fd_core.ops.contract import SCALE_BYTES, Array, KVShape
from fd_core.ops.torch.attention import TorchKVCache
from fd_core.types import IntArray

from fd_gpu_cuda.device import CopyLane, Cuda

STAGED_BYTES = 16 * 2**20
"""Bytes of a lane's memory, on host and device: large compared with the cost of queueing a copy (0.3 ms at 50 GB/s)."""
_LANES = 2
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""Torch dtypes for moving bits, by size."""


class _StagedLane:
    """A lane and its staging memory for `capacity` blocks of `parts`, each [layers, sides, blocks, heads, width]."""

    def __init__(self, lane: CopyLane, parts: Sequence[Array], capacity: int) -> None:
        layers, sides, _, heads, _ = parts[0].shape
        self._lane = lane
        self._parts = parts
        self._widths = [part.shape[4] for part in parts]
        sizes, word = (capacity, layers, sides, heads, sum(self._widths)), parts[0].dtype
        self._index = lane.pinned((capacity,), torch.int64)
        self._host = lane.pinned(sizes, word)
        self._staged = lane.empty(sizes, word)
        self._places = lane.empty((capacity,), torch.int64)

    def export(self, blocks: IntArray) -> None:
        """Queue an export: gather blocks in canonical order and copy them to the host."""
        staged, places = self._begin(blocks)
        with self._lane.queueing():
            places.copy_(self._index[: len(blocks)], non_blocking=True)
            # The gather writes through a view of another order, so it rearranges as well.
            for mine, part in self._pairs(staged):
                torch.index_select(part, 2, places, out=mine)
            self._host[: len(blocks)].copy_(staged, non_blocking=True)

    def exported(self, count: int) -> npt.NDArray[Any]:
        """Wait for the export, and return the bytes of its blocks, valid until the lane is used again."""
        self._lane.wait()
        return _bytes_of(self._host[:count])

    def bring(self, blocks: IntArray, content: npt.NDArray[np.uint8]) -> None:
        """Queue an import: copy the bytes of blocks to the device and scatter them. Waits for the lane first."""
        self._lane.wait()
        _bytes_of(self._host[: len(blocks)])[:] = content
        staged, places = self._begin(blocks)
        with self._lane.queueing():
            places.copy_(self._index[: len(blocks)], non_blocking=True)
            staged.copy_(self._host[: len(blocks)], non_blocking=True)
            for mine, part in self._pairs(staged):
                part.index_copy_(2, places, mine)

    def wait(self) -> None:
        """Wait for the queued work."""
        self._lane.wait()

    def _pairs(self, staged: Array) -> Iterator[tuple[Array, Array]]:
        return zip(staged.permute(1, 2, 0, 3, 4).split(self._widths, dim=4), self._parts, strict=True)

    def _begin(self, blocks: IntArray) -> tuple[Array, Array]:
        self._index[: len(blocks)].numpy()[:] = blocks
        return self._staged[: len(blocks)], self._places[: len(blocks)]


class BlockCopies:
    """Copies blocks of one cache. Staging memory is allocated at the first copy.

    Copies are not ordered with steps: the caller has the outputs of all steps that touch these blocks, and queues none
    before completion. One copy runs at a time; other threads wait.
    """

    def __init__(self, parts: Sequence[Array], block_size: int, cuda: Cuda, staged_bytes: int = STAGED_BYTES) -> None:
        """`parts`: [layers, sides, slots, heads, width]; a block is `block_size` slots of each layer and side.

        In canonical order, a head of a block is the concatenation of its parts.
        """
        layers, sides, places, count = parts[0].shape[:4]
        # A single part is copied as one long head.
        heads = block_size * count if len(parts) > 1 else 1
        found = [part.view(layers, sides, places // block_size, heads, -1) for part in parts]
        size = math.gcd(max(_WORDS), *(each.shape[4] * each.element_size() for each in found))
        self._parts = [each.view(_WORDS[size]) for each in found]
        self._cuda = cuda
        self._block_bytes = sum(each[:, :, 0].numel() for each in self._parts) * size
        self._capacity = max(1, staged_bytes // self._block_bytes)
        self._lanes: list[_StagedLane] = []
        self._one_at_a_time = threading.Lock()

    def export(self, blocks: IntArray, to: npt.NDArray[Any]) -> None:
        """Fill `to` [len(blocks), ...] with the blocks' bits in canonical order. Raises `MemoryError`."""
        target = _rows(to, self._block_bytes)
        with self._one_at_a_time:
            self._prepare()
            parts = list(self._chunks(blocks))
            for at, (_, part) in enumerate(parts):
                if at >= _LANES:
                    self._empty(at - _LANES, parts, target)
                self._lanes[at % _LANES].export(part)
            for at in range(max(len(parts) - _LANES, 0), len(parts)):
                self._empty(at, parts, target)

    def bring(self, blocks: IntArray, content: npt.NDArray[Any]) -> None:
        """Write the result of `export` into blocks, and wait for completion. Raises `MemoryError`."""
        source = _rows(np.ascontiguousarray(content), self._block_bytes)
        with self._one_at_a_time:
            self._prepare()
            for at, (begin, part) in enumerate(self._chunks(blocks)):
                self._lanes[at % _LANES].bring(part, source[begin : begin + len(part)])
            for lane in self._lanes:
                lane.wait()

    def _empty(self, at: int, parts: list[tuple[int, IntArray]], target: npt.NDArray[np.uint8]) -> None:
        begin, part = parts[at]
        target[begin : begin + len(part)] = self._lanes[at % _LANES].exported(len(part))

    def _chunks(self, blocks: IntArray) -> Iterator[tuple[int, IntArray]]:
        for begin in range(0, len(blocks), self._capacity):
            yield begin, blocks[begin : begin + self._capacity]

    def _prepare(self) -> None:
        """Allocate all lanes or none."""
        if self._lanes:
            for lane in self._lanes:
                lane.wait()  # work of an aborted copy may still be in flight
            return
        try:
            self._lanes = [_StagedLane(self._cuda.copy_lane(), self._parts, self._capacity) for _ in range(_LANES)]
        except RuntimeError as error:
            needed = 2 * _LANES * self._capacity * self._block_bytes
            raise MemoryError(f"cannot allocate {needed} bytes, half of it pinned, to copy KV: {error}") from error


def _rows(array: npt.NDArray[Any], block_bytes: int) -> npt.NDArray[np.uint8]:
    """Return an array's bytes, one row per block."""
    return array.view(np.uint8).reshape(len(array), block_bytes) if array.size else np.empty((0, block_bytes), np.uint8)


def _bytes_of(host: Array) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[Any] = host.numpy()
    return _rows(found, found[0].nbytes)


class CudaLayer(NamedTuple):
    """One layer's keys and values, each [slots, nkv, d] without gaps, and their scales if they are int8, not FP8.

    Scales are separate, so that 8-bit heads are aligned to 16 bytes. Of a latent cache, values are the latent ones
    [slots, 1, latent], and keys only the rotated parts before them [slots, 1, d - latent].
    """

    keys: Array
    values: Array
    block_size: int
    key_scales: Array | None = None
    """float32[slots, nkv]"""
    value_scales: Array | None = None
    """float32[slots, nkv]"""

    @property
    def quantized(self) -> bool:
        """True if keys and values have scales."""
        return self.key_scales is not None

    @property
    def arrays(self) -> tuple[Array | None, ...]:
        """Keys, values and their scales, in the argument order of kernels."""
        return self.keys, self.values, self.key_scales, self.value_scales


class CudaKVCache(TorchKVCache):
    """The core's cache with an additional block for padding, and copies on separate streams.

    A copy waits only for its streams, with the GIL released, so steps continue.
    """

    def __init__(self, shape: KVShape, num_blocks: int, dtype: Any, cuda: Cuda) -> None:
        super().__init__(shape, num_blocks + 1, dtype, cuda.device)
        self.num_blocks = num_blocks
        self.spare_block = num_blocks
        layers, sides, *places = self._data.shape[:-1]
        widths = [shape.head_dim - shape.latent, shape.latent] if shape.latent else [shape.head_dim]
        # Scales first, float32 [layers, sides, slots, nkv] of each width, then the elements [..., width]: all aligned.
        count = math.prod((layers, sides, *places))
        scaled = [SCALE_BYTES] * len(widths) if shape.quantized else []
        memory = self._data.view(-1).split([count * width for width in (*scaled, *reversed(widths))])
        parts = [each.view(layers, sides, *places, -1) for each in memory]
        scales, elements = parts[: len(scaled)], parts[len(scaled) :][::-1]
        canonical = [*chain.from_iterable(zip(elements, scales, strict=True))] if scales else elements
        self._copies = BlockCopies(canonical, shape.block_size, cuda)
        if shape.dtype == "fp8":
            elements = [each.view(torch.float8_e4m3fn) for each in elements]
        factors = [each.view(torch.float32).squeeze(-1) for each in scales]
        # Keys and values are the two sides, or the two widths of a latent cache.
        arrays = (each[:, side] for each in (*elements, *factors) for side in range(sides))
        self._cuda_layers = [
            CudaLayer(keys, values, shape.block_size, *rest) for keys, values, *rest in zip(*arrays, strict=True)
        ]

    def layer(self, index: int) -> CudaLayer:  # type: ignore[override]  # the kernels read another layout
        return self._cuda_layers[index]

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks to the host, a few at a time. Raises `MemoryError`, which fails only this copy."""
        exported = np.empty((len(blocks), *self.shape.block_sizes), self.host_dtype)
        self._copies.export(blocks, exported)
        return exported

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Write exported blocks and wait for completion. Raises `MemoryError`, which fails only this copy."""
        self._copies.bring(blocks, self.checked(blocks, data))
