"""Recorder of the kernels that Paddle launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fd_core.ops.paddle.framework import paddle


@contextmanager
def recorded_calls() -> Iterator[list[str]]:
    """Collect the names of Paddle's kernel launches within the block, views included, in the order of a trace."""
    profiler = paddle.profiler
    names: list[str] = []

    def collect(recorded: Any) -> None:
        nodes = list(recorded.profiler_result.get_data().values())
        for node in nodes:  # grows meanwhile
            if node.type == profiler.TracerEventType.DygraphKernelLaunch:
                names.append(node.name.removesuffix(" kernel launch"))
            nodes += node.children_node

    with profiler.Profiler(targets=[profiler.ProfilerTarget.CPU], on_trace_ready=collect):
        yield names
