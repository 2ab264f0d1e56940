"""Ranks as threads of one process, for tests of groups without subprocesses."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from fd_core.ops.parallel import Parallel, RankGroup, SharedMemoryGroup, group_memory

_T = TypeVar("_T")


def shared_memory_ranks(size: int, timeout: float) -> Sequence[RankGroup]:
    """Return the ends of a group that shares memory."""
    descriptor = group_memory(size)
    try:
        return [SharedMemoryGroup(Parallel(rank, size), descriptor, timeout) for rank in range(size)]
    finally:
        os.close(descriptor)


def gloo_ranks(size: int, timeout: float) -> Sequence[RankGroup]:
    """Return the ends of a group over loopback; needs torch."""
    from fd_core.ops.torch.group import TorchGroup

    first = TorchGroup.open(size, timeout)
    return [first, *(TorchGroup.join(Parallel(rank, size), first.rendezvous, timeout) for rank in range(1, size))]


def expert_parallel(make: Callable[[int, float], Sequence[RankGroup]]) -> Callable[[int, float], Sequence[RankGroup]]:
    """Return a function that makes groups whose ranks divide experts."""

    def made(size: int, timeout: float) -> Sequence[RankGroup]:
        groups = make(size, timeout)
        for group in groups:
            group.parallel = replace(group.parallel, expert_parallel=True)
        return groups

    return made


def on_ranks(
    size: int,
    work: Callable[[RankGroup], _T],
    timeout: float = 20.0,
    make: Callable[[int, float], Sequence[RankGroup]] = shared_memory_ranks,
) -> list[_T]:
    """Run `work` on each rank of a group concurrently, and return the results.

    If one raises, the group is abandoned; the first error by rank is raised.
    """

    def run(group: RankGroup) -> _T:
        try:
            return work(group)
        except BaseException:
            group.abandon()
            raise

    groups = make(size, timeout)  # all are held to the end: freeing one closes its connections
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, group) for group in groups]]
