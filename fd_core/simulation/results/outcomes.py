"""What a run writes down, as plain values: one outcome for each request, and what workers held from time to time."""

from __future__ import annotations

import msgspec


class RequestOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What became of one request. Times are seconds from the begin of the run."""

    request_id: str
    tenant: str
    priority: int
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were found in a prefix cache."""
    output_tokens: int
    """Tokens that reached the client."""
    arrived: float
    """When the client sent it."""
    first_token: float | None
    """When the first token reached the client; None if none did."""
    ended: float
    end: str
    """`stop` or `length`; `left` if the client left, `refused` if nobody took it, `failed` if the answer broke off,
    `abort` if an operator ended it."""
    reason: str
    """Why it was refused or failed; empty otherwise."""
    longest_gap: float
    """Longest time between two deliveries of tokens to the client."""
    worker: int
    """Index of the worker that answered; -1 if none did."""
    attempts: int
    """Workers that were tried."""


class WorkerSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one worker held at one time."""

    at: float
    worker: int
    waiting: int
    running: int
    used_blocks: int
    cached_blocks: int


class Absence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Some time in which a worker served nobody. Times are seconds from the begin of the run."""

    worker: int
    begin: float
    end: float
    restarts: bool
    """Whether its process was there and loaded another engine; else there was no process."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated run."""

    label: str
    """What was simulated, in a few words."""
    seed: int
    seconds: float
    """Virtual time from the first arrival to the last end."""
    wall_seconds: float
    """What the run took; left out of comparisons."""
    workers: tuple[str, ...]
    """Name of each worker, with its role."""
    blocks: tuple[int, ...]
    """KV blocks of each worker."""
    outcomes: tuple[RequestOutcome, ...]
    """In the order of their ends."""
    samples: tuple[WorkerSample, ...]
    counters: dict[str, float]
    """Sums over workers and routers, by metric name."""
    profile: str
    """Which costs were used, and whether they were measured or calculated."""
    waits: bytes = b""
    """Where the time of each request went: float32[requests, 2, reasons], seconds, in the order of `outcomes`, before
    the first token and behind it, by `fd_core.simulation.clock.waits.WAITS`. Empty if nothing tells."""
    absences: tuple[Absence, ...] = ()
    """In the order of their ends; those of the end of the run are there too."""
