"""A view into a runner for audits and tests; the runner itself has no use for it."""

from __future__ import annotations

from dataclasses import dataclass

from fd_core.ops.contract import Ops
from fd_core.runner.batch import PersistentBatch
from fd_core.runner.drafting import Drafter

__all__ = ["RunnerProbe"]


@dataclass(frozen=True, slots=True)
class RunnerProbe:
    """The parts of one runner as they are, not copies: whoever changes them may break every law."""

    ops: Ops
    batch: PersistentBatch
    drafter: Drafter | None
