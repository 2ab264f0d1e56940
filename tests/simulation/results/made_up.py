"""Synthetic runs without simulation: a queue per worker, drawn from a seed."""

from __future__ import annotations

import numpy as np

from fd_core.simulation.clock.waits import WAITS
from fd_core.simulation.results.summary import RequestOutcome, Run, WorkerSample

_BLOCKS = 500
_SLOTS = 48


def outcome(
    name: str = "r",
    arrived: float = 0.0,
    first: float | None = 0.5,
    ended: float = 1.0,
    output: int = 11,
    *,
    prompt: int = 100,
    cached: int = 0,
    end: str = "stop",
    tenant: str = "",
    gap: float = 0.05,
    worker: int = 0,
    reason: str = "",
) -> RequestOutcome:
    return RequestOutcome(
        name, tenant, 0, prompt, cached, output, arrived, first, ended, end, reason, gap, worker, worker >= 0
    )


def run_of(*outcomes: RequestOutcome, samples: tuple[WorkerSample, ...] = (), seed: int = 0, **fields: object) -> Run:
    first = min((each.arrived for each in outcomes), default=0.0)
    values: dict[str, object] = {
        "label": "made up",
        "seconds": max((each.ended for each in outcomes), default=0.0) - first,
        "wall_seconds": 0.1,
        "workers": ("w0",),
        "blocks": (_BLOCKS,),
        "counters": {},
        "profile": "made up, calculated, never measured",
    }
    return Run(seed=seed, outcomes=outcomes, samples=samples, **(values | fields))  # type: ignore[arg-type]


def waits_of(*requests: tuple[dict[str, float], dict[str, float]]) -> bytes:
    """Return `Run.waits` of requests with the given seconds before and after the first token, by reason."""
    parts = [[part.get(reason, 0.0) for reason in WAITS] for both in requests for part in both]
    return np.array(parts, np.float32).tobytes()


def queued(
    requests: int = 500,
    rate: float = 4.0,
    *,
    seed: int = 0,
    workers: int = 2,
    slower: float = 1.0,
    noise: int = 0,
    label: str = "made up",
) -> Run:
    """Return a run of requests that queue for workers in turn, prefill, then decode more slowly in larger batches.

    The seed determines arrivals and lengths; `slower` stretches every step; `noise` seeds the random variation of this
    run.
    """
    draw = np.random.default_rng(seed)
    luck = np.random.default_rng([seed, noise]).lognormal(0.0, 0.05, requests).tolist()
    arrived = np.cumsum(draw.exponential(1 / rate, requests)).tolist()
    prompts = (16 + draw.lognormal(5.5, 0.8, requests)).astype(int).tolist()
    outputs = (1 + draw.lognormal(4.0, 0.7, requests)).astype(int).tolist()
    cached = (draw.random(requests) < 0.3).tolist()
    free = [0.0] * workers
    outcomes, spans, reasons = [], [], {}
    for index in range(requests):
        worker = index % workers
        start = max(free[worker], arrived[index])
        compute = prompts[index] * 4e-4 * slower * luck[index] * (0.4 if cached[index] else 1.0)
        free[worker] = start + compute
        step = 0.02 * slower * luck[index] * (1 + max(0.0, start - arrived[index]))
        first = start + compute + step
        outcomes.append(
            outcome(
                f"r{index}",
                arrived[index],
                first,
                first + step * (outputs[index] - 1),
                outputs[index],
                prompt=prompts[index],
                cached=int(prompts[index] * 0.6) if cached[index] else 0,
                end="length" if index % 9 == 0 else "stop",
                tenant=("free", "paid", "batch")[index % 3],
                gap=step * 1.7,
                worker=worker,
            )
        )
        took = outcomes[-1].ended - first
        again = took / 4 if index % 50 == 1 else 0.0
        reasons[f"r{index}"] = (
            {"computing": compute + step, "slot": start - arrived[index]},
            {"computing": took - again, "preempted": again},
        )
        spans.append((arrived[index], start, outcomes[-1].ended, worker, prompts[index] // 16 + 1))
    last = max(each.ended for each in outcomes)
    table = np.array(spans).reshape(-1, 5)
    samples = []
    for at in np.linspace(0.0, last, min(400, requests)).tolist():
        for worker in range(workers):
            own = table[table[:, 3] == worker]
            runs = (own[:, 1] <= at) & (own[:, 2] > at)
            waits = int(np.count_nonzero((own[:, 0] <= at) & (own[:, 1] > at)))
            used = min(_BLOCKS, int(own[runs, 4].sum()))
            running = min(_SLOTS, int(np.count_nonzero(runs)))
            samples.append(WorkerSample(at, worker, waits, running, used, (_BLOCKS - used) // 2))
    outcomes.sort(key=lambda each: each.ended)
    return run_of(
        *outcomes,
        samples=tuple(samples),
        seed=seed,
        label=label,
        workers=tuple(f"mixed-{index}" for index in range(workers)),
        blocks=(_BLOCKS,) * workers,
        counters={"preemptions": float(requests // 50), "steps": 10.0 * requests},
        waits=waits_of(*(reasons[each.request_id] for each in outcomes)),
    )
