"""Arrays passed between stages arrive once and in order, at any relative speed."""

import time

import numpy as np
import pytest

from fd_core.ops.parallel import RankExchangeError, SharedMemoryGroup
from fd_core.testing.kit.ranks import on_ranks

SHAPES = [(1 + step % 3, 40) for step in range(30)]


@pytest.mark.parametrize("slow", [None, 0, 1, 2])
def test_stages_receive_arrays_of_the_previous_stage(slow: int | None) -> None:
    def work(group: SharedMemoryGroup) -> list[float]:
        rank, seen = group.parallel.rank, []
        for step, shape in enumerate(SHAPES):
            x = np.full(shape, step, np.float32) if rank == 2 else group.take(shape)
            assert x.shape == shape
            if rank == slow:
                time.sleep(0.001)
            if rank:
                group.pass_on(x + 100)
            seen.append(float(x.min() + x.max()) / 2)
        return seen

    ends, middle, begin = on_ranks(3, work)
    assert begin == list(range(30))
    assert middle == [step + 100 for step in begin] and ends == [step + 200 for step in begin]


def test_stage_that_does_not_receive_is_named() -> None:
    def work(group: SharedMemoryGroup) -> None:
        for _ in range(4 * group.parallel.rank):
            group.pass_on(np.zeros((1, 4), np.float32))
        time.sleep(0.2)

    with pytest.raises(RankExchangeError, match=r"rank 0 did not respond within 0\.05 s"):
        on_ranks(2, work, timeout=0.05)
