"""The stepper's KV outside the device, in tiers that a test plays."""

from __future__ import annotations

from fd_core.scheduling.operations.kv_offloading import KeepKV
from fd_core.testing.schedulers.tiers import ScriptedTiers
from tests.engine.stepping import Stepper

__all__ = ["ScriptedTiers", "keep_kv"]


def keep_kv(
    stepper: Stepper, *, preempted: bool = True, finished: bool = False, persist: bool = False
) -> ScriptedTiers:
    """Let the stepper's scheduler keep KV outside the device, in tiers that the test plays."""
    stepper.probe.offloading.keep = KeepKV(preempted, finished, persist)
    stepper.tiers = ScriptedTiers(stepper.runner.cache)
    return stepper.tiers
