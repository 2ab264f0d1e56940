"""The KV cache takes what the largest step leaves."""

from __future__ import annotations

from fd_gpu_cuda.backend import GRAPH_BYTES, kv_bytes, step_bytes


def test_a_step_and_the_graphs_come_first() -> None:
    step = step_bytes(tokens=2048, rows=32, hidden=4096, vocabulary=128_256)
    assert 2**29 < step < 2**30 + 2**28
    assert kv_bytes(10 * 2**30, step) == 10 * 2**30 - step - GRAPH_BYTES


def test_a_larger_budget_or_more_logits_leave_less() -> None:
    small = step_bytes(tokens=2048, rows=32, hidden=4096, vocabulary=32_000)
    assert step_bytes(tokens=8192, rows=32, hidden=4096, vocabulary=32_000) > small
    assert step_bytes(tokens=2048, rows=128, hidden=4096, vocabulary=32_000) > small


def test_nothing_is_left_where_the_step_does_not_fit() -> None:
    assert kv_bytes(2**20, 2**21) == 0
