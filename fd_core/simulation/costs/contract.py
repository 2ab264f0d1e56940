"""What a simulation asks about time. All answers are in seconds; none depends on anything but the arguments."""

from __future__ import annotations

import abc

from fd_core.types import StepPlan

__all__ = ["Costs"]


class Costs(abc.ABC):
    """Times of one worker."""

    @abc.abstractmethod
    def step(self, plan: StepPlan) -> float:
        """Return how long the device computes a plan; rows with `num_tokens` tokens at positions from `starts` on."""

    def shared_read(self, positions: int) -> float:
        """Return how much less a step takes if `positions` of what its rows read were read by another row before.

        Rows that begin with the same prefix have its blocks in common, and find them in the device's caches.
        """
        return 0.0

    @abc.abstractmethod
    def turn(self, plan: StepPlan) -> float:
        """Return how long the engine's loop takes for a plan and its answer while the device need not wait for it.

        With one plan in flight the device waits for the loop; with two the loop's time is hidden behind the device.
        """

    @abc.abstractmethod
    def request(self, tokens: int) -> float:
        """Return how long a server takes with a request of `tokens` tokens before its engine has it."""

    @abc.abstractmethod
    def delivery(self) -> float:
        """Return how long a token takes from the engine to the client, without the network."""

    @abc.abstractmethod
    def host_copy(self, blocks: int) -> float:
        """Return how long copying KV blocks between device and host takes."""

    @abc.abstractmethod
    def store_read(self, blocks: int) -> float:
        """Return how long reading KV blocks from the store takes, the question included."""

    @abc.abstractmethod
    def store_write(self, blocks: int) -> float:
        """Return how long writing KV blocks to the store takes."""

    @abc.abstractmethod
    def transfer(self, blocks: int) -> float:
        """Return how long a prefill worker takes to hand KV blocks to a decode worker."""
