"""Ranks as threads of one process, for what needs several ends of one group and no processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fd_core.ops.parallel import Parallel, RankGroup, group_bytes

__all__ = ["on_ranks"]

_T = TypeVar("_T")


def on_ranks(size: int, work: Callable[[RankGroup], _T], patience: float = 20.0) -> list[_T]:
    """Run `work` on each rank of a group, all at the same time, and return what each made of it.

    If one raises, the others are told; the first error by rank is raised.
    """
    descriptor = os.memfd_create("fdcore-ranks")
    try:
        os.ftruncate(descriptor, group_bytes(size))
        groups = [RankGroup(Parallel(rank, size), descriptor, patience) for rank in range(size)]
    finally:
        os.close(descriptor)

    def run(group: RankGroup) -> _T:
        try:
            return work(group)
        except BaseException:
            group.abandon()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, group) for group in groups]]
