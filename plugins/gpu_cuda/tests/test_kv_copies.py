"""Copies of KV through staging memory: with any timing of the streams the data is exact, and memory is bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fd_core.ops.contract import KVShape  # noqa: E402 - only where torch is installed
from processor import AtOnce, Processor, ids, make_ops  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from fd_gpu_cuda.kv_cache import BlockCopies, CudaKVCache  # noqa: E402

BLOCKS = 23
SHAPES = {
    "float32": (torch.float32, KVShape(2, 3, 10, 5)),
    "bfloat16": (torch.bfloat16, KVShape(3, 1, 7, 1)),  # a row of 14 bytes
    "float16": (torch.float16, KVShape(2, 2, 6, 3)),
    "fp8": (torch.bfloat16, KVShape(2, 3, 10, 2, dtype="fp8")),
    "int8": (torch.bfloat16, KVShape(2, 3, 10, 2, dtype="int8")),
    "latent": (torch.bfloat16, KVShape(2, 1, 13, 3, latent=8)),
    "latent int8": (torch.bfloat16, KVShape(2, 1, 13, 3, dtype="int8", latent=8)),
}


class _Queue(TorchDispatchMode):
    """Defers operations instead of computing them, except views."""

    def __init__(self, kept: list[Callable[[], Any]]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not name.startswith(("aten.copy_", "aten.index_select.out", "aten.index_copy_")):
            return func(*args, **(kwargs or {}))
        self.kept.append(lambda: func(*args, **(kwargs or {})))
        return args[0] if kwargs is None or "out" not in kwargs else kwargs["out"]


class Late(AtOnce):
    """Lane that delays all queued work until a caller waits for it."""

    def __init__(self, device: LateDevice) -> None:
        self.queued: list[Callable[[], Any]] = []
        self.device = device

    def pinned(self, shape: Sequence[int], dtype: Any) -> Any:
        self.device.allocate()
        memory = super().pinned(shape, dtype)
        self.device.host_bytes += memory.numel() * memory.element_size()
        return memory

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        self.device.allocate()
        memory = super().empty(shape, dtype)
        self.device.device_bytes += memory.numel() * memory.element_size()
        return memory

    @contextmanager
    def queueing(self) -> Iterator[None]:
        with _Queue(self.queued):
            yield
        self.device.most_in_flight = max(
            self.device.most_in_flight, sum(bool(lane.queued) for lane in self.device.lanes)
        )

    def wait(self) -> None:
        while self.queued:
            self.queued.pop(0)()


class LateDevice(Processor):
    """Counts the allocations of its lanes, and fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: list[Late] = []
        self.host_bytes = self.device_bytes = self.most_in_flight = 0
        self.refusals = 0

    def copy_lane(self) -> Late:
        self.lanes.append(Late(self))
        return self.lanes[-1]

    def allocate(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("CUDA error: out of memory")


def cache_on(device: Processor, kind: str, blocks_at_once: int) -> CudaKVCache:
    """Return a cache of random bits."""
    dtype, shape = SHAPES[kind]
    cache = CudaKVCache(shape, BLOCKS, dtype, device)
    generator = torch.Generator().manual_seed(1)
    for part in cache._copies._parts:
        part.view(torch.uint8).random_(generator=generator)
    cache._copies._capacity = max(blocks_at_once, 1)
    return cache


def every_block(cache: CudaKVCache) -> np.ndarray:
    """Return the bytes of all blocks [blocks, layers, sides, heads, bytes], gathered according to the contract."""
    layers = []
    for index in range(cache.shape.num_layers):
        keys, values, _, *scales = cache.layer(index)
        sides = [[keys, scales[0]], [values, scales[1]]]
        if cache.shape.latent:
            sides = [[*sides[0], *sides[1]]]
        layers.append(
            [np.concatenate([bytes_of_blocks(part) for part in side if part is not None], -1) for side in sides]
        )
    return np.array(layers).transpose(2, 0, 1, 3, 4)


def bytes_of_blocks(part: Any) -> np.ndarray:
    """Return what one part of a layer holds of each head: [blocks, block_size * nkv, bytes]."""
    slots, heads, *_ = part.shape
    size = slots // (BLOCKS + 1)
    return part.contiguous().view(torch.uint8).numpy().reshape(BLOCKS + 1, size * heads, -1)


def expected(cache: CudaKVCache, blocks: np.ndarray) -> np.ndarray:
    return every_block(cache)[blocks]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("device", [Processor, LateDevice])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 11, 23])
def test_every_block_arrives_bit_for_bit_in_its_order(kind: str, device: type[Processor], count: int) -> None:
    """Eager streams overwrite memory before a late read; late streams read memory that has been refilled."""
    cache = cache_on(device(), kind, 3)
    rng = np.random.default_rng(count)
    blocks = rng.permutation(BLOCKS)[:count].astype(np.int32)
    exported = cache.export_blocks(blocks)
    assert exported.shape == (count, *cache.shape.block_sizes)
    assert exported.tobytes() == expected(cache, blocks).tobytes()
    elsewhere = rng.permutation(BLOCKS)[:count].astype(np.int32)
    before = every_block(cache)
    exported.flags.writeable = False
    cache.import_blocks(elsewhere, exported)
    before[elsewhere] = before[blocks]
    np.testing.assert_array_equal(every_block(cache), before)


def test_two_lanes_are_in_flight_and_memory_does_not_grow() -> None:
    device = LateDevice()
    cache = cache_on(device, "float32", 2)
    block = cache.shape.bytes_per_block(4)
    assert device.host_bytes == 0  # a cache that is never copied needs none
    for _ in range(3):
        cache.import_blocks(np.arange(BLOCKS), cache.export_blocks(np.arange(BLOCKS)))
    assert len(device.lanes) == device.most_in_flight == 2
    indices = 2 * 2 * 8
    assert device.host_bytes == device.device_bytes == 2 * 2 * block + indices


def test_block_larger_than_the_staging_memory_is_copied_alone() -> None:
    cache = cache_on(LateDevice(), "float32", 1)
    assert BlockCopies([cache._data], 5, LateDevice(), staged_bytes=1)._capacity == 1
    assert cache.export_blocks(ids(4, 2)).tobytes() == expected(cache, ids(4, 2)).tobytes()


def test_an_exported_array_is_the_callers() -> None:
    cache = cache_on(LateDevice(), "float32", 1)
    held = cache.export_blocks(ids(1, 2, 3))
    before = held.tobytes()
    cache.export_blocks(ids(7, 8, 9))
    cache.import_blocks(ids(1, 2, 3), np.zeros_like(held))
    assert held.tobytes() == before


@pytest.mark.parametrize("refusals", [1, 4])
def test_copy_without_memory_fails_and_the_next_one_works(refusals: int) -> None:
    device = LateDevice()
    cache = cache_on(device, "float32", 2)
    device.refusals = 1
    for _ in range(refusals):
        device.refusals = 1
        with pytest.raises(MemoryError, match="pinned"):
            cache.export_blocks(ids(1))
    assert cache.export_blocks(ids(1)).tobytes() == expected(cache, ids(1)).tobytes()


def test_copy_after_a_failed_one_is_complete() -> None:
    """The first lane's work was queued, the second one's failed."""
    device = LateDevice()
    cache = cache_on(device, "float32", 2)
    cache.export_blocks(ids(0))
    data = cache.export_blocks(np.arange(4))
    second = device.lanes[1]
    second.wait = lambda: (_ for _ in ()).throw(RuntimeError("a broken stream"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="broken"):
        cache.import_blocks(np.arange(4, 8), data)
    del second.wait
    blocks = np.arange(10, 16)
    wanted = expected(cache, blocks).tobytes()
    assert cache.export_blocks(blocks).tobytes() == wanted


def test_two_threads_take_turns() -> None:
    cache = cache_on(LateDevice(), "bfloat16", 2)
    halves = (np.arange(11), np.arange(11, 22))
    contents = [cache.export_blocks(half) for half in halves]
    wrong: list[str] = []

    def work(mine: int) -> None:
        for _ in range(20):
            found = cache.export_blocks(halves[mine])
            if found.tobytes() != contents[mine].tobytes():
                wrong.append(f"thread {mine} read other bits")
            cache.import_blocks(halves[mine], found)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_blocks_outside_the_cache_are_rejected() -> None:
    cache = cache_on(Processor(), "float32", 2)
    data = cache.export_blocks(ids(1, 2))
    with pytest.raises(ValueError, match=r"got blocks of float32\[2, .*expected float32\[1"):
        cache.import_blocks(ids(1), data)
    with pytest.raises(ValueError, match="got blocks of uint16"):
        cache.import_blocks(ids(1, 2), data.view(np.uint16))


def test_cache_has_a_block_for_padding() -> None:
    cache = make_ops(Processor(), "bfloat16").allocate_kv(KVShape(2, 2, 8, 4), 6)
    assert (cache.num_blocks, cache.spare_block) == (6, 6)
