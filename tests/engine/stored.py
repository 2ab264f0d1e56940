"""KV offload of the stepper, in tiers scripted by the test."""

from __future__ import annotations

from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.testing.schedulers.tiers import ScriptedTiers
from tests.engine.stepping import Stepper

__all__ = ["ScriptedTiers", "keep_kv"]


def keep_kv(
    stepper: Stepper, *, preempted: bool = True, finished: bool = False, persist: bool = False
) -> ScriptedTiers:
    """Enable KV offload of the stepper's scheduler, in tiers scripted by the test."""
    stepper.probe.offloading.keep = OffloadSelection(preempted, finished, persist)
    stepper.tiers = ScriptedTiers(stepper.runner.cache)
    return stepper.tiers
