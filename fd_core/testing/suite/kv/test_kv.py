"""KV: blocks are exported and imported bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fd_core.ops.contract import KVCache, KVShape, Ops
from fd_core.testing.kit.growth import count_elements, cpu_seconds
from fd_core.testing.kit.target import Target
from fd_core.testing.models.arrays import assert_same, heads_on
from fd_core.testing.schedulers.scripted import count_bytes

REQUIRES = ("kv_transfer",)

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=10, block_size=5)


def blocks(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def test_blocks_are_restored_bit_for_bit(ops: Ops, require: Callable[..., None]) -> None:
    require("primitives")
    cache = ops.allocate_kv(SHAPE, 7)
    bits = np.random.default_rng(0).integers(0, 2**16, (3, 4, 2, 5, 6, 10)).astype(np.uint16)  # including NaN
    wide = (bits.astype(np.uint32) << 16 | bits).view(np.float32)
    halves: npt.NDArray[Any] = bits if ops.dtype == "bfloat16" else bits.view(np.float16)
    check_restored(cache, wide if ops.dtype == "float32" else halves)


def check_restored(cache: KVCache, data: npt.NDArray[Any]) -> None:
    """Import a share of the layers and heads of read-only blocks, as ranks and stages do, and export it."""
    data.flags.writeable = False
    share = data[:, 1:3, :, :, 2:5]
    cache.import_blocks(blocks(6, 0, 3), share)
    for some, right in ((blocks(6, 0, 3), share), (blocks(3), share[2:])):
        assert_same(cache.export_blocks(some).view(np.uint8), np.ascontiguousarray(right).view(np.uint8))


@pytest.mark.parametrize(("block_size", "exports"), [(5, 1100), (512, 140)])
def test_exports_stay_as_they_are_after_others(
    ops: Ops, require: Callable[..., None], block_size: int, exports: int
) -> None:
    """Hold exports of a block, each with other bits, as a store does until it has written them: more than 64 MiB."""
    require("primitives")
    shape = replace(SHAPE, num_layers=1, num_kv_heads=4, head_dim=64 if block_size > 5 else 10, block_size=block_size)
    cache, held = ops.allocate_kv(shape, 2), list[npt.NDArray[Any]]()
    block = cache.export_blocks(blocks(1))
    for number in range(exports):
        block.view(np.uint8)[...] = number % 63  # a finite number in every format
        cache.import_blocks(blocks(1), block)
        held.append(cache.export_blocks(blocks(1)))
    changed = [number for number, each in enumerate(held) if (each.view(np.uint8) != number % 63).any()]
    assert not changed, f"{len(changed)} of {exports} exports, of {block.nbytes:,} bytes each, were changed by others"


def test_blocks_of_another_type_are_refused(ops: Ops, require: Callable[..., None]) -> None:
    require("primitives")
    cache = ops.allocate_kv(SHAPE, 7)
    held = cache.export_blocks(blocks(0))
    other = held.astype(np.uint16 if held.dtype == np.float32 else np.float32)
    with pytest.raises(ValueError, match=str(other.dtype)):
        cache.import_blocks(blocks(0), other)
    # On a thread, as copies are, so that a lock which the error left held fails the test instead of blocking it.
    again = threading.Thread(target=cache.import_blocks, args=(blocks(1), np.ones_like(held)), daemon=True)
    again.start()
    again.join(20.0)
    assert not again.is_alive(), "an import after one that was refused does not end"
    assert_same(cache.export_blocks(blocks(0, 1)), np.concatenate([held, np.ones_like(held)]))


@pytest.mark.parametrize("copied", ["export", "import"])
def test_no_write_waits_while_a_copy_sleeps(
    ops: Ops, require: Callable[..., None], monkeypatch: pytest.MonkeyPatch, copied: str
) -> None:
    """A copy engine may be polled on the thread of the copy, but under no lock that each layer of a step needs."""
    require("primitives")
    cache, sleep, waited = ops.allocate_kv(SHAPE, 7), time.sleep, list[bool]()
    k, v = (heads_on(ops, np.ones((1, SHAPE.num_kv_heads, SHAPE.head_dim), np.float32))[1] for _ in range(2))
    write = partial(ops.write_kv, cache.layer(0), k, v, ops.from_host(blocks(5 * SHAPE.block_size)))
    held, copying = cache.export_blocks(blocks(1, 3)), threading.get_ident()
    write()

    def polled(seconds: float) -> None:
        if threading.get_ident() == copying:
            writer = threading.Thread(target=write, daemon=True)
            writer.start()
            writer.join(1.0)
            waited.append(writer.is_alive())
        sleep(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", polled)
        if copied == "export":
            cache.export_blocks(blocks(1, 3))
        else:
            cache.import_blocks(blocks(1, 3), held)
    assert not any(waited), (
        f"`write_kv` waits while the {copied} of two blocks sleeps, which holds a lock of all blocks"
    )


_SMALL, _LARGE = 16, 24_000
"""Blocks of pools of which a call uses one block; the larger one has about 100 MB."""
_POOLS = {
    "heads": KVShape(1, 2, 64, block_size=4),
    "latents": KVShape(1, 1, 128, block_size=8, latent=96),
}


@pytest.mark.fd_alone
@pytest.mark.parametrize("kind", _POOLS)
def test_cost_of_a_block_does_not_grow_with_the_pool(target: Target, require: Callable[..., None], kind: str) -> None:
    """Count memory and elements, and compare CPU time, as compiled code writes what no counter sees."""
    require("kv_transfer", *["latents"] * (kind == "latents"))
    costs, ops, shape = [], target.ops, _POOLS[kind]
    for count in (_SMALL, _LARGE):
        cache, some = ops.allocate_kv(shape, count), blocks(count - 2)
        data = cache.export_blocks(some)
        calls: dict[str, Callable[[], Any]] = {
            "an export": lambda: cache.export_blocks(some),  # noqa: B023 - called at once
            "an import": lambda: cache.import_blocks(some, data),  # noqa: B023
        }
        if "primitives" not in target.limits:
            sizes = (shape.head_dim - shape.latent, shape.latent) if shape.latent else 2 * (shape.head_dim,)
            k, v = (heads_on(ops, np.ones((1, shape.num_kv_heads, size), np.float32))[1] for size in sizes)
            slot, layer = ops.from_host((some * shape.block_size).astype(np.int32)), cache.layer(0)
            calls["a write"] = partial(ops.write_kv, layer, k, v, slot)
        costs.append(
            {
                (name, unit): measure(call)
                for name, call in calls.items()
                for unit, measure in (("bytes", count_bytes), ("elements", count_elements), ("s", cpu_seconds))
                if name == "an export" or unit != "elements"  # torch returns all that an operation writes into
            }
        )
    few, many = costs
    for (name, unit), cost in many.items():
        most = 4 * few[name, unit] + (5e-3 if unit == "s" else 2**18)
        pools = f"in a pool of {_SMALL} blocks, and {cost:,} in one of {_LARGE:,}"
        assert cost <= most, f"{name} of one block takes {few[name, unit]:,} {unit} {pools}"
