"""Costs that are easy to add up."""

from __future__ import annotations

from fd_core.simulation.costs.profile import Costs
from fd_core.types import StepPlan

__all__ = ["FixedCosts"]


class FixedCosts(Costs):
    """Powers of two, so that sums of a few are exact."""

    def __init__(self) -> None:
        """Accept no profile."""

    def step(self, plan: StepPlan) -> float:
        return 2**-7

    def shared_read(self, positions: int) -> float:
        return 0.0

    def turn(self, plan: StepPlan) -> float:
        return 0.0

    def request(self, tokens: int) -> float:
        return 0.0

    def delivery(self) -> float:
        return 0.0

    def host_copy(self, blocks: int) -> float:
        return blocks * 2**-10

    def store_read(self, blocks: int) -> float:
        return 2**-6 + blocks * 2**-9

    def store_write(self, blocks: int) -> float:
        return 2**-6 + blocks * 2**-9

    def transfer(self, blocks: int) -> float:
        return blocks * 2**-9
