"""The benchmark of the host's part of a step measures a whole step: one upload and one fetch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks import host_step


@pytest.mark.parametrize("kind", host_step.KINDS)
def test_pipelined_step_uploads_once_and_fetches_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    for name in ("upload", "from_host", "fetch_later", "to_host", "gather_rows", "write_rows", "add_at", "penalize"):
        before = getattr(host_step.NothingOps, name)

        def counted(*arguments: Any, name: str = name, before: Any = before) -> Any:
            calls[name] += 1
            return before(*arguments)

        monkeypatch.setattr(host_step.NothingOps, name, counted)
    host = host_step.HostSteps(64, host_step.KINDS[kind], 6)
    host.step()
    calls.clear()
    for _ in range(4):
        assert host.step() > 0
    penalized = 4 if kind == "penalties" else 0
    assert calls == Counter(
        upload=4,
        fetch_later=4,
        write_rows=4,  # the last tokens are kept
        gather_rows=8 + penalized,  # they are fed, and make the grid
        add_at=penalized,
        penalize=penalized,
    )
