"""Scaling policies: the number of workers of a group, and the load it depends on. Pure: no I/O, clock or randomness.

A policy proposes a number; the controller enforces the bounds of the file and drains excess workers. Plugins offer
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
    """Load of a group of workers at one moment; sums and means are over its ready workers."""

    role: Role
    target: int
    """Target number of workers at this moment."""
    ready: int
    """Ready workers; while they are fewer than `target`, some are starting."""
    running: int = 0
    """Requests in slots."""
    waiting: int = 0
    """Requests that wait for a slot."""
    slots: int = 0
    kv_usage: float = 0.0
    """Share of the KV blocks in use, 0 to 1."""
    ttft_seconds: float | None = None
    """90th percentile of the time to the first token over the last half minute, in seconds; None without requests. For
    prefill workers it is that of the decode workers, which clients observe.
    """


class ScalingPolicy(ABC):
    """Proposes numbers of workers; each group has a separate object, which lives as long as the deployment."""

    @abstractmethod
    def __init__(self, options: Mapping[str, Any]) -> None:
        """`options` are those of the group, such as `{"ttft-seconds": 2}`; other groups have other ones.

        Raises `ConfigError` that names one.
        """

    @abstractmethod
    def propose(self, load: GroupLoad, now: float) -> int:
        """Return the target number of workers. Called every few seconds; `now` is a monotonic clock in seconds, which
        jumps if the machine was suspended. The first load may be that of several workers, those of the file.
        `load.target` is the last number within the bounds of the file. Workers may end at any time, all of them at
        once: that few are ready, or none, is no reason to propose fewer.
        """


class LoadPolicyOptions(CheckedStruct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """Options of the policy `load`."""

    waiting: Annotated[float, Range(0, 1e6, above=True)] = 2.0
    """Waiting requests per ready worker above which workers are added."""
    kv_usage: Annotated[float, Range(0, 1, above=True)] = 0.9
    """Share of KV blocks in use above which workers are added."""
    ttft_seconds: Annotated[float, Range(0, 86400, above=True)] | None = None
    """Time to the first token, in seconds, that one request of ten may exceed before workers are added; ignored by
    default."""
    room: Annotated[float, Range(0, 1, above=True)] = 0.7
    """A worker is removed if the others would then use no more than this share of slots and of the limits above."""
    up_seconds: Annotated[float, Range(0, 86400)] = 5.0
    """Time that the load has to exceed a limit before workers are added, in seconds."""
    down_seconds: Annotated[float, Range(0, 86400)] = 120.0
    """Time with spare capacity before a worker is removed, and after each change, in seconds."""


class LoadPolicy(ScalingPolicy):
    """Adds workers while requests queue, KV runs out or first tokens are late; removes one after long spare room."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        fields = {name.replace("-", "_"): value for name, value in options.items()}
        self.options = make_settings(LoadPolicyOptions, fields)
        self._too_much_since: float | None = None
        self._room_since: float | None = None

    def propose(self, load: GroupLoad, now: float) -> int:
        """Return the number for this load: at most twice as many, or one less."""
        if load.ready < load.target or not load.ready:
            # Starting workers have yet to take their share; the load is not meaningful until then.
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
        """Return the load as a share of the capacity of `workers`; above 1 is too much."""
        options = self.options
        shares = [load.waiting / workers / options.waiting, load.kv_usage * load.ready / workers / options.kv_usage]
        if options.ttft_seconds is not None and load.ttft_seconds is not None:
            shares.append(load.ttft_seconds / options.ttft_seconds)
        return max(shares)


def _since(before: float | None, holds: bool, now: float) -> float | None:
    """Return the time since which a condition holds; None while it does not."""
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
