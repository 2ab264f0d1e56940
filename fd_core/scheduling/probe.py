"""A view into a scheduler for audits and tests, which the engine itself has no use for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fd_core.kv.blocks import BlockPool
from fd_core.scheduling.admission_control import AdmissionControl
from fd_core.scheduling.kv_offloading import KVOffloading
from fd_core.scheduling.kv_operations import KVOperations
from fd_core.scheduling.kv_transferring import KVTransferring
from fd_core.scheduling.prefixes import Prefixes
from fd_core.scheduling.requests import Request
from fd_core.scheduling.residencies import Residencies
from fd_core.scheduling.slots import SlotTable
from fd_core.scheduling.waiting import WaitingQueue

__all__ = ["SchedulerProbe"]


@dataclass(frozen=True, slots=True)
class SchedulerProbe:
    """The parts of one scheduler as they are, not copies: who changes them may break every law."""

    slots: SlotTable
    pool: BlockPool
    requests: Mapping[str, Request]
    """Requests that have not ended, by id."""
    waiting: WaitingQueue
    prefixes: Prefixes
    residencies: Residencies
    operations: KVOperations
    offloading: KVOffloading
    transferring: KVTransferring
    control: AdmissionControl
