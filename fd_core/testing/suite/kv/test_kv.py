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

from fd_core.ops.contract import KVShape, Ops
from fd_core.testing.models.arrays import assert_same, heads_on

REQUIRES = ("kv_transfer",)

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=10, block_size=5)


def blocks(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


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
