"""Memory: constant over thousands of steps, and accurate `free_memory`."""

from __future__ import annotations

import gc
import io
import itertools
import os
import statistics
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec
import numpy as np
import pytest

from fd_core.backends.contract import Backend
from fd_core.backends.memory import available_memory
from fd_core.ops.contract import KVCache, KVShape, Ops
from fd_core.ops.weights import ITEM_BYTES
from fd_core.testing.axes.parts import Part, supported_by
from fd_core.testing.kit.growth import require_bounded
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.kit.target import Target
from fd_core.testing.models.adapters import write_adapter
from fd_core.testing.models.arrays import other_values
from fd_core.testing.models.checkpoints import STEP_CASE
from fd_core.testing.models.stepper import ManualDriver
from fd_core.testing.models.texts import greedy, run
from fd_core.testing.suite.test_cases import OPERATIONS, check

pytestmark = pytest.mark.fd_alone
KIBI: Final = 2**10
MEBI: Final = 2**20
MOST_BYTES: Final = 24
"""Growth of traced memory per step, which is exact; a leaked array takes more than a hundred bytes. Likewise of what is
written to files, by which threads may wake each other."""
LONGEST_PROMPT: Final = 24
WIDTHS: Final = (1, 2, 5, 13)
DECODES: Final = 15
CALLS: Final = 8
SLOTS = 5
ROOM: dict[str, Any] = {
    "max_num_seqs": SLOTS,
    "num_kv_blocks": SLOTS * 4,
    "block_size": 16,
    "max_model_len": 64,
    "max_num_batched_tokens": 300,
}
PARAMS: list[dict[str, Any]] = [
    {},
    {"logprobs": 5},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "logprobs": 0},
    {"temperature": 1.0, "logit_bias": {3: 2.0, 90: -4.0}},
]


def resident() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not publish it."""
    gc.collect()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def live_objects() -> int:
    """Return the number of memory blocks of Python objects, which grows with each leaked object."""
    gc.collect()
    return sys.getallocatedblocks()


def bytes_written() -> int:
    """Return the bytes that this process has written to files and sockets; 0 if the system does not publish it."""
    try:
        return int(Path("/proc/self/io").read_text().split()[3])
    except (OSError, IndexError):
        return 0


def counts_host_memory(backend: Backend) -> bool:
    """True if a backend's free memory is, or follows, that of the host; other processes may disturb some readings."""
    return any(_follows_the_host(backend) for _ in range(3))


def _follows_the_host(backend: Backend) -> bool:
    seen = []
    for _ in range(3):
        seen.append((backend.free_memory(), available_memory()))
        taken = np.ones(384 * MEBI // 8)
        seen.append((backend.free_memory(), available_memory()))
        del taken
    ours, host = np.array(seen, np.float64).T
    return bool(ours.std() > 0 and host.std() > 0 and np.corrcoef(ours, host)[0, 1] > 0.9)


def filled_cache(ops: Ops, size: int) -> KVCache:
    """Allocate a cache of about `size` bytes and write to all of it."""
    # One layer, because the C library does not return arrays below 32 MiB to the system.
    shape = KVShape(num_layers=1, num_kv_heads=8, head_dim=128, block_size=64)
    blocks = max(size // shape.bytes_per_block(ITEM_BYTES[ops.dtype]), 1)
    cache = ops.allocate_kv(shape, blocks)
    ones = np.ones_like(cache.export_blocks(np.zeros(1, np.int32)))
    for first in range(0, blocks, 16):
        some = np.arange(first, min(first + 16, blocks), dtype=np.int32)
        cache.import_blocks(some, ones.repeat(len(some), axis=0))
    return cache


def cycle(hand: ManualDriver, rng: np.random.Generator, cache: KVCache | None) -> int:
    """Admit prompts of random lengths, prefill them in random chunks, decode in random batches, and revoke.

    Blocks of `cache`, if any, are copied to the host and back.

    Return the number of steps. Hardly any two steps have the same rows, widths and contexts; single rows have one of
    few widths and contexts, so that what a library caches for a row, such as numpy for a sum, soon is complete.
    """
    left = rng.integers(1, LONGEST_PROMPT, SLOTS).tolist()
    for slot, length in enumerate(left):
        prompt = rng.integers(0, 90, length).tolist()
        hand.admit(slot, prompt, **PARAMS[int(rng.integers(len(PARAMS)))])
    steps = 0
    while any(left):
        widths = rng.choice(WIDTHS, SLOTS).tolist()
        counts = [width if width <= count else min(count, 1) for width, count in zip(widths, left, strict=True)]
        left = [count - own for count, own in zip(left, counts, strict=True)]
        rows = [(slot, own, not left[slot]) for slot, own in enumerate(counts) if own]
        hand.step(*(rows[index] for index in rng.permutation(len(rows))))
        steps += 1
    for _ in range(DECODES):
        if cache is not None:
            blocks = rng.permutation(cache.num_blocks)[: rng.integers(1, 4)].astype(np.int32)
            cache.import_blocks(blocks, cache.export_blocks(blocks))
        hand.step(*((slot, 1) for slot in rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].tolist()))
    hand.step(back=range(SLOTS))
    return steps + DECODES + 1


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Return the growth per step of (step, amount) points: the median over all pairs, see Sen (1968)."""
    pairs = itertools.combinations(points, 2)
    return statistics.median((later - before) / (end - begin) for (begin, before), (end, later) in pairs)


def test_memory_is_flat_over_thousands_of_steps(target: Target) -> None:
    """Run steps whose shapes do not repeat, and compare the growth per step: a leak of a new shape is a leak."""
    rng = np.random.default_rng(3)
    readings: list[tuple[int, ...]] = []
    with target.engine(**ROOM) as engine:
        hand = ManualDriver(engine)
        cache = None if "kv_transfer" in target.limits else hand.runner.cache
        steps = 0
        while steps < 600:
            steps += cycle(hand, rng, cache)
        tracemalloc.start()
        try:
            while steps < 3000:
                cycle_end = steps + 200
                while steps < cycle_end:
                    steps += cycle(hand, rng, cache)
                objects, process = live_objects(), resident()
                traced = tracemalloc.get_traced_memory()[0]
                readings.append((steps, objects, traced, process, bytes_written(), -target.backend.free_memory()))
        finally:
            tracemalloc.stop()
        hand.close()
    growth = [slope([(each[0], each[column]) for each in readings]) for column in range(1, 6)]
    assert growth[0] < 0.1, f"{growth[0]:.2f} objects leak per step"
    assert growth[1] < MOST_BYTES, f"{growth[1]:.0f} bytes of Python and numpy leak per step, {MOST_BYTES} are allowed"
    assert growth[2] < 3 * KIBI, f"the process grows by {growth[2]:.0f} bytes per step"
    assert growth[3] < MOST_BYTES, f"each step writes {growth[3]:.0f} bytes to files, which grow for ever"
    if growth[4] >= 3 * KIBI:
        assert counts_host_memory(target.backend), f"the device loses {growth[4]:.0f} bytes per step"


@pytest.mark.parametrize("part", OPERATIONS, ids=lambda part: part.name)
def test_nothing_remains_of_an_operation(target: Target, part: Part[Ops]) -> None:
    """Call it in its plainest case with ever other values; few requests need some of them."""
    case = part.case("").with_only(supported_by(target.ops, target.limits))
    check(target, case)

    def use(number: int) -> None:
        with other_values(1 + number):
            part.check(target.ops, case.values)

    require_bounded(use, CALLS, f"calls of {part.name}", "1", may_wait=True)


def test_memory_of_a_rising_context_is_linear(target: Target) -> None:
    """Compute a context of each length, after the longest one, for which tables have their size, and count all arrays.

    Libraries keep as much for each new length; what is kept for each position of each length grows with the length.
    """
    longest, grown = 400, list[int]()
    room = {**ROOM, "max_num_seqs": 1, "num_kv_blocks": 27, "max_model_len": 432, "max_num_batched_tokens": 432}
    with target.engine(**room) as engine:
        hand = ManualDriver(engine)
        for length in (longest, 1):
            hand.admit(0, [7] * length)
            hand.step((0, length))
            hand.step((0, 1))
            hand.step(back=[0])
        hand.admit(0, [7])
        tracemalloc.start()
        try:
            held = bytes_of_arrays(target.ops)
            for _ in range(2):
                for _ in range(longest // 2):
                    hand.step((0, 1))
                before, held = held, bytes_of_arrays(target.ops)
                grown.append(held - before)
        finally:
            tracemalloc.stop()
        hand.close()
    shorter, longer = grown
    about = f"contexts of 1 to {longest // 2} tokens leave {shorter:,} bytes, those to {longest} leave {longer:,}"
    assert longer - shorter < 64 * KIBI, about


def bytes_of_arrays(ops: Ops) -> int:
    """Return the bytes of live arrays of the pack's framework, and those that Python and numpy allocated."""
    gc.collect()
    cls, found = type(ops.from_host(np.zeros(1, np.int32))), dict[int, int]()
    for each in gc.get_objects() if cls is not np.ndarray else ():
        if type(each) is cls:
            memory: Any = each.untyped_storage() if hasattr(each, "untyped_storage") else None
            key = id(each) if memory is None else memory.data_ptr()
            found[key] = int(each.nbytes) if memory is None else memory.nbytes()
    return sum(found.values()) + tracemalloc.get_traced_memory()[0]


def test_unloaded_adapters_are_freed(target: Target, checkpoints: Path, require: Callable[..., None]) -> None:
    """Replace an adapter of at least a MiB again and again, each after a request."""
    require("checkpoints")
    model = target.checkpoint(STEP_CASE)
    assert model is not None
    folders = [write_adapter(model, checkpoints / f"replaced-{seed}", seed=seed, rank=128) for seed in range(2)]
    with target.engine(case=STEP_CASE, max_loras=1, max_lora_rank=128) as engine:

        def taken(cycles: int) -> list[int]:
            """Return the growth of this process, and what the device loses, while adapters are loaded and unloaded."""
            before = resident(), -target.backend.free_memory()
            for _ in range(cycles):
                for folder in folders:
                    digest = engine.load_adapter("replaced", folder).digest
                    run(engine, [msgspec.structs.replace(greedy("a", range(9), 2), adapter=digest)])
                    engine.unload_adapter("replaced")
                    engine.begin_steps()  # which releases it
            return [resident() - before[0], -target.backend.free_memory() - before[1]]

        taken(3)  # libraries allocate their caches on first use
        process, device = taken(20)
    assert process < 20 * MEBI, f"the process grows by {process / MEBI:.0f} MiB with 40 adapters"
    if device >= 20 * MEBI:
        assert counts_host_memory(target.backend), f"the device loses {device / MEBI:.0f} MiB with 40 adapters"


def test_free_memory_can_be_allocated(target: Target, require: Callable[..., None]) -> None:
    """Allocate nine tenths of it on a device, or a harmless share of host memory."""
    require("primitives", "kv_transfer")
    host = counts_host_memory(target.backend)
    gc.collect()
    free = target.backend.free_memory()
    assert free > 0
    wanted = min(int(free * 0.9), 512 * MEBI) if host else int(free * 0.9)
    cache = filled_cache(target.ops, wanted)
    places = np.array([0, cache.num_blocks // 2, cache.num_blocks - 1], np.int32)
    assert cache.export_blocks(places).all()


def test_free_memory_respects_the_limit_of_the_container(target: Target, tmp_path: Path) -> None:
    """Read the files of a control group with 96 MiB left; memory of a device does not count against it."""
    if not counts_host_memory(target.backend):
        lacks("it does not compute in host memory")
    values = {"cgroup": "0::/\n", "memory.max": str(396 * MEBI), "memory.current": str(300 * MEBI), "memory.stat": ""}
    for name, value in values.items():
        (tmp_path / name).write_text(value)

    def read(file: Any, *arguments: Any, **named: Any) -> Any:
        path = str(file)
        if path == "/proc/self/cgroup" or path.startswith("/sys/fs/cgroup/"):
            file = tmp_path / Path(path).name
        return opened(file, *arguments, **named)

    opened = io.open
    with mock.patch("io.open", read), mock.patch("builtins.open", read):
        free = target.backend.free_memory()
    assert free <= 96 * MEBI, f"free memory is {free // MEBI} MiB in a container with 96 MiB left"


def test_free_memory_falls_with_a_cache_and_returns(target: Target, require: Callable[..., None]) -> None:
    """Exact on a device. Host memory is shared, so there it must follow the system's number."""
    require("primitives", "kv_transfer")
    host = counts_host_memory(target.backend)
    held = filled_cache(target.ops, 256 * MEBI)  # libraries allocate their caches on first use
    del held
    gc.collect()
    before, process = target.backend.free_memory(), resident()
    for _ in range(3):
        cache = filled_cache(target.ops, 256 * MEBI)
        fallen = before - target.backend.free_memory()
        assert host or fallen > 192 * MEBI, f"free memory decreased by {fallen / MEBI:.0f} MiB for a cache of 256"
        del cache
        gc.collect()
    lost = before - target.backend.free_memory()
    assert host or lost < 64 * MEBI, f"{lost / MEBI:.0f} MiB of three caches were not freed"
    assert resident() - process < 128 * MEBI, "the process retains freed caches"
