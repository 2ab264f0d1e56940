"""Times by the terms of a profile."""

from __future__ import annotations

import abc
from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from fd_core.simulation.costs.profile import CostCurve, CostProfile, KVLink
from fd_core.types import StepPlan


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


_ONES = np.ones(4096)


def step_features(plan: StepPlan) -> tuple[int, int, int, int, float, int]:
    """Return what a step's cost depends on.

    Tokens, rows that sample, rows, positions whose KV is read, pairs of a token and a position it attends to, drafts.
    """
    lengths, starts = plan.num_tokens.astype(np.float64), plan.starts.astype(np.float64)
    rows = len(lengths)
    # Sums as products with ones take a third of the time that reductions take; they are exact below 2**53.
    ones = _ONES[:rows] if rows <= len(_ONES) else np.ones(rows)
    tokens = int(lengths.dot(ones))
    read = int(starts.dot(ones)) + tokens
    sampled = int(np.count_nonzero(plan.samples))
    if tokens == rows:  # no row has drafts or a chunk
        return tokens, sampled, rows, read, read, 0
    pairs = float(lengths.dot(starts) + (lengths.dot(lengths) + tokens) / 2)
    return tokens, sampled, rows, read, pairs, int(plan.num_drafts.astype(np.float64).dot(ones))


class _ProfileCosts(Costs):
    """Computes each time from the terms of one profile."""

    def __init__(
        self, profile: CostProfile, block_bytes: int, host: KVLink, read: KVLink, write: KVLink, transfer: KVLink
    ) -> None:
        step, self._request = profile.step, profile.request
        self._constant = step.constant
        self._by_tokens, self._by_sampled = curve_function(step.by_tokens), curve_function(step.by_sampled_rows)
        self._per = (step.per_row, step.per_context_token, step.per_query_key, step.per_draft)
        self._per_shared = step.per_shared_position
        self._block_bytes = block_bytes
        self._host, self._read, self._write, self._transfer = host, read, write, transfer

    def step(self, plan: StepPlan) -> float:
        tokens, sampled, rows, read, pairs, drafts = step_features(plan)
        if not tokens:
            return 0.0
        row, position, pair, draft = self._per
        return (
            self._constant
            + self._by_tokens(tokens)
            + self._by_sampled(sampled)
            + row * rows
            + position * read
            + pair * pairs
            + draft * drafts
        )

    def shared_read(self, positions: int) -> float:
        return self._per_shared * positions

    def turn(self, plan: StepPlan) -> float:
        return self._request.turn + self._request.turn_per_row * len(plan.slots)

    def request(self, tokens: int) -> float:
        return self._request.receive + self._request.receive_per_token * tokens

    def delivery(self) -> float:
        return self._request.delivery

    def host_copy(self, blocks: int) -> float:
        return self._host.seconds(blocks * self._block_bytes)

    def store_read(self, blocks: int) -> float:
        return self._read.seconds(blocks * self._block_bytes)

    def store_write(self, blocks: int) -> float:
        return self._write.seconds(blocks * self._block_bytes)

    def transfer(self, blocks: int) -> float:
        return self._transfer.seconds(blocks * self._block_bytes)


def costs_of(
    profile: CostProfile,
    *,
    block_size: int | None = None,
    host_copy: KVLink | None = None,
    store_read: KVLink | None = None,
    store_write: KVLink | None = None,
    transfer: KVLink | None = None,
) -> Costs:
    """Return the times of a worker by a profile; each link and the tokens in a block may be other than the profile's.

    A step without any token costs nothing: a plan may hold nothing but revocations.
    """
    return _ProfileCosts(
        profile,
        profile.model.kv_bytes_per_token * (block_size or profile.limits.block_size),
        host_copy or profile.host_copy,
        store_read or profile.store_read,
        store_write or profile.store_write,
        transfer or profile.transfer,
    )


def curve_function(curve: CostCurve) -> Callable[[float], float]:
    """Return a curve as a function: by bisection, which takes less time than arrays do."""
    counts, seconds = (0.0, *curve.counts), (curve.seconds[0], *curve.seconds)
    if curve.counts[0] == 0:
        counts, seconds = curve.counts, curve.seconds
    slopes = [(d - c) / (b - a) for a, b, c, d in zip(counts, counts[1:], seconds, seconds[1:], strict=False)] or [0.0]
    slopes = [*slopes, slopes[-1]][: len(counts)]

    def look_up(count: float) -> float:
        at = bisect_right(counts, count) - 1
        return seconds[at] + slopes[at] * (count - counts[at])

    return look_up
