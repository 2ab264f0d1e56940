"""Ranks as threads of one process, for what needs several ends of one group and no processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fd_core.ops.parallel import Parallel, RankGroup, SharedMemoryGroup, group_memory

_T = TypeVar("_T")


def shared_memory_ranks(size: int, patience: float) -> Sequence[RankGroup]:
    """Return the ends of a group that shares memory."""
    descriptor = group_memory(size)
    try:
        return [SharedMemoryGroup(Parallel(rank, size), descriptor, patience) for rank in range(size)]
    finally:
        os.close(descriptor)


def gloo_ranks(size: int, patience: float) -> Sequence[RankGroup]:
    """Return the ends of a group that meets on loopback; needs torch."""
    from fd_core.ops.torch.group import TorchGroup

    first = TorchGroup.open(size, patience)
    return [first, *(TorchGroup.join(Parallel(rank, size), first.meeting, patience) for rank in range(1, size))]


def on_ranks(
    size: int,
    work: Callable[[RankGroup], _T],
    patience: float = 20.0,
    make: Callable[[int, float], Sequence[RankGroup]] = shared_memory_ranks,
) -> list[_T]:
    """Run `work` on each rank of a group, all at the same time, and return what each made of it.

    If one raises, the others are told; the first error by rank is raised.
    """

    def run(group: RankGroup) -> _T:
        try:
            return work(group)
        except BaseException:
            group.abandon()
            raise

    groups = make(size, patience)  # all are held until the last has ended: the end of one is the end of its connections
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, group) for group in groups]]
