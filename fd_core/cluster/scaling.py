"""How many workers a group should have: policies, and what they look at. Pure: no I/O, no clock, no randomness.

A policy proposes a number; the controller holds the bounds of the file and drains whoever is too much. Plugins offer
policies through `fd_core.hookspecs.fd_register_scaling_policies`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from fd_core.config.constraints import CheckedStruct, Range, make_settings
from fd_core.router.workers import Role

__all__ = ["GroupLoad", "LoadPolicy", "LoadPolicyOptions", "ScalingPolicy", "quantile"]


class GroupLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a group of workers does at one moment; sums and means are over its ready workers."""

    role: Role
    target: int
    """Workers that the group should have at this moment."""
    ready: int
    """Workers that serve; while they are fewer than `target`, some are starting."""
    running: int = 0
    """Requests in slots."""
    waiting: int = 0
    """Requests that wait for a slot."""
    slots: int = 0
    kv_usage: float = 0.0
    """Share of the KV blocks in use, 0 to 1."""
    ttft_seconds: float | None = None
    """Time to the first token that nine of ten requests of the last half minute did not exceed; None without requests.
    For prefill workers that of the decode workers, which is what clients feel."""


class ScalingPolicy(ABC):
    """Proposes numbers of workers; each group has an object of its own, which lives as long as the deployment."""

    @abstractmethod
    def __init__(self, options: Mapping[str, Any]) -> None:
        """`options` are those of the file, such as `{"ttft-seconds": 2}`. Raises `ConfigError` that names one."""

    @abstractmethod
    def propose(self, load: GroupLoad, now: float) -> int:
        """Return how many workers there should be. Called every few seconds; `now` is a monotonic clock in seconds."""


class LoadPolicyOptions(CheckedStruct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """Options of the policy `load`."""

    waiting: Annotated[float, Range(0, 1e6, above=True)] = 2.0
    """Requests that may wait, for each ready worker, before there are more workers."""
    kv_usage: Annotated[float, Range(0, 1, above=True)] = 0.9
    """Share of KV blocks that may be in use before there are more workers."""
    ttft_seconds: Annotated[float, Range(0, 86400, above=True)] | None = None
    """Time to the first token that one request of ten may exceed before there are more workers; by default it does not
    matter."""
    room: Annotated[float, Range(0, 1, above=True)] = 0.7
    """A worker leaves if the others would then use no more than this share of slots and of the limits above."""
    up_seconds: Annotated[float, Range(0, 86400)] = 5.0
    """For which there has to be too much before there are more workers."""
    down_seconds: Annotated[float, Range(0, 86400)] = 120.0
    """For which there has to be room before a worker leaves, and after each change."""


class LoadPolicy(ScalingPolicy):
    """More workers while requests queue, KV runs out or first tokens are late; one less after a long time with room."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        fields = {name.replace("-", "_"): value for name, value in options.items()}
        self.options = make_settings(LoadPolicyOptions, fields)
        self._too_much_since: float | None = None
        self._room_since: float | None = None

    def propose(self, load: GroupLoad, now: float) -> int:
        """Return the number for this load: at most twice as many, or one less."""
        if load.ready < load.target or not load.ready:
            # What starts has yet to take its share; nothing can be said of the load until then.
            self._too_much_since = self._room_since = None
            return load.target
        options, pressure = self.options, self._pressure(load, load.ready)
        self._too_much_since = _since(self._too_much_since, pressure > 1, now)
        others = load.ready - 1
        fits = (
            others > 0
            and not load.waiting
            and load.running <= options.room * load.slots * others / load.ready
            and self._pressure(load, others) <= options.room
        )
        self._room_since = _since(self._room_since, fits, now)
        if self._too_much_since is not None and now - self._too_much_since >= options.up_seconds:
            self._too_much_since = self._room_since = None
            return math.ceil(load.ready * min(pressure, 2.0))
        if self._room_since is not None and now - self._room_since >= options.down_seconds:
            self._room_since = None
            return load.target - 1
        return load.target

    def _pressure(self, load: GroupLoad, workers: int) -> float:
        """Return what there is to do as a share of what `workers` may have; above 1 is too much."""
        options = self.options
        shares = [load.waiting / workers / options.waiting, load.kv_usage * load.ready / workers / options.kv_usage]
        if options.ttft_seconds is not None and load.ttft_seconds is not None:
            shares.append(load.ttft_seconds / options.ttft_seconds)
        return max(shares)


def _since(before: float | None, holds: bool, now: float) -> float | None:
    """Return since when something holds; None while it does not."""
    if not holds:
        return None
    return now if before is None else before


def quantile(share: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """Return the upper bound of the quantile's bucket, twice the last beyond all; None if all n + 1 counts are 0."""
    left = share * sum(counts)
    if not left:
        return None
    for bound, count in zip(bounds, counts, strict=False):
        left -= count
        if left <= 0:
            return bound
    return 2 * bounds[-1]
