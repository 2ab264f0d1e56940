"""Several workers as one service under concurrent clients and injected faults, and the invariants that must hold."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tests.server.processes import serving
from tests.soak.cluster import Cluster, Usage, cluster_of
from tests.soak.crowd import Answer, ClientProfile, Crowd, Failed, Prompt, Report, ask_alone, client_profiles
from tests.soak.watching import Watch, at_rest, usages
from tests.soak.worker_faults import KINDS, SHORT, UNREACHABLE_SECONDS, Executed, Kind, inject_all, plan

__all__ = ["NULL", "SMALL", "SMOLLM2", "Scale", "run_service"]

_STEMS: Final = 12
_NO_ENDS: Final = ("selected", "prompt_blocks", "hit_blocks")
"""Outcomes in a tally that do not end a selection."""
_MIB: Final = 1 << 20
_NOTICES_SECONDS: Final = 1.0
"""Seconds by which a busy client may notice the start of its answer later than the router."""
_SPARE_DESCRIPTORS: Final = 12
"""Margin for each connection that can be idle by then: health checks keep some open to each worker in use."""
_SPARE_THREADS: Final = 4
_SPARE_BYTES: Final = 24 * _MIB
"""Limit on the growth of the router's memory in the last half of a run."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Model and load of a run."""

    model: str
    serve: tuple[str, ...]
    route: tuple[str, ...]
    vocabulary: tuple[int, int]
    requests: int
    at_once: int
    prompts: int
    """Number of distinct prompts; each is sent many times."""
    long_tokens: int
    """Tokens of an answer that fills all buffers on its way."""
    longest: float
    """Time limit of one request, in seconds."""
    pair: tuple[str, ...]
    """Additional arguments of prefill and decode workers."""
    rounds: int = 2
    kinds: tuple[Kind, ...] = KINDS
    rests: float = 5.0
    """Seconds after which no request may be counted and no block leased."""


_HEALTH: Final = (
    *("--health-check-interval-secs", "0.5", "--health-check-timeout-secs", "2"),
    *("--unreachable-timeout", str(UNREACHABLE_SECONDS)),
    # Up to three workers are faulty at a time, and one of the others can serve every request.
    *("--max-attempts", "6"),
)
_SERVE: Final = ("--num-threads", "1", "--log-level", "warning", "--block-size", "16")
NULL: Final = Scale(
    model="null",
    serve=(
        *("null", "--backend", "null", "--max-model-len", "2048", "--max-num-seqs", "24", "--num-kv-blocks", "256"),
        *_SERVE,
    ),
    route=("--policy", "cache_aware", "--tokenizer", "bytes", "--cache-block-size", "16", *_HEALTH),
    vocabulary=(0, 256),
    requests=10_000,
    at_once=96,
    prompts=300,
    long_tokens=1200,
    longest=60.0,
    pair=("--lease-seconds", "2"),
)
SMALL: Final = replace(NULL, requests=800, at_once=16, prompts=60, long_tokens=800, rounds=1, kinds=SHORT)
"""A short run, less than a minute."""
SMOLLM2: Final = Scale(
    model="smollm2",
    serve=("smollm2", "--backend", "cpu", "--max-model-len", "512", "--num-kv-blocks", "256", *_SERVE),
    route=("--policy", "cache_aware", "--tokenizer", "smollm2", "--cache-block-size", "16", *_HEALTH),
    vocabulary=(1000, 20000),
    requests=300,
    at_once=16,
    prompts=40,
    long_tokens=120,
    longest=300.0,
    pair=("--lease-seconds", "5"),
    rounds=1,
)


@dataclass(slots=True)
class Run:
    """All results of a run."""

    report: Report
    done: Executed
    watch: Watch
    before: dict[str, Usage] = field(default_factory=dict)
    after: dict[str, Usage] = field(default_factory=dict)
    seconds: float = 0.0
    rested: float = 0.0
    streams_broken: int = 0


def run_service(folder: Path, scale: Scale, roles: Sequence[str], seed: int) -> Run:
    """Run the service, check all invariants and print a summary."""
    print(f"seed {seed}")
    prompts = _prompts(scale, seed)
    with serving(folder / "alone.log", *scale.serve, "--num-kv-blocks", "2048") as alone:
        whole = asyncio.run(ask_alone(alone.url, prompts))
    run = asyncio.run(_run(folder, scale, roles, seed, prompts, whole))
    _print_summary(run)
    _check(run, scale)
    return run


async def _run(
    folder: Path, scale: Scale, roles: Sequence[str], seed: int, prompts: list[Prompt], whole: list[list[Answer]]
) -> Run:
    every = client_profiles(prompts, scale.requests, seed)
    async with cluster_of(folder, roles, serve=scale.serve, pair=scale.pair, route=scale.route) as cluster:
        crowd = Crowd(cluster.router.url, prompts, whole, at_once=scale.at_once, longest=scale.longest)
        # One-time allocations, such as threads at the first request, belong to the baseline.
        await crowd.ask_all(client_profiles(prompts, scale.requests // 20, seed + 1))
        await at_rest(cluster, scale.rests)
        before = await _usages_at_rest(cluster, None)
        watch, done = Watch(cluster), Executed()
        lanes = plan(roles, seed, kinds=scale.kinds, rounds=scale.rounds)
        began = time.monotonic()

        async def begins(share: float) -> None:
            while crowd.num_sent < scale.requests // 20 + share * scale.requests:
                await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch.watch())
            working = [group.create_task(inject_all(lane, cluster, done, begins)) for lane in lanes.values()]
            await crowd.ask_all(_until_all_injected(every, working))
            await asyncio.gather(*working)
            watching.cancel()
        run = Run(crowd.report, done, watch, before, seconds=time.monotonic() - began)
        run.rested = await at_rest(cluster, scale.rests)
        await watch.sample()
        shown = await cluster.status()
        assert shown["faults"] == 0
        for each in shown["workers"]:
            tally = each["tally"]
            ends = sum(count for name, count in tally.items() if name not in _NO_ENDS)
            assert tally["selected"] == ends, each
        run.streams_broken = shown["streams_broken"]
        run.after = await _usages_at_rest(cluster, before)
        return run


def _until_all_injected(
    every: Sequence[ClientProfile], working: Sequence[asyncio.Task[None]]
) -> Iterator[ClientProfile]:
    """Yield all, then start over while faults are being injected."""
    yield from every
    again = itertools.cycle(every)
    while not all(task.done() for task in working):
        yield next(again)


def _prompts(scale: Scale, seed: int) -> list[Prompt]:
    """Return prompts with common prefixes in groups, as token ids or chats; some with two answers, some long."""
    rng = random.Random(seed)
    stems = [[rng.randrange(*scale.vocabulary) for _ in range(rng.randrange(16, 96))] for _ in range(_STEMS)]
    made = []
    for index in range(scale.prompts):
        long = index % 25 == 0
        body = {
            "model": scale.model,
            "max_tokens": scale.long_tokens if long else rng.randrange(4, 56),
            "temperature": (0.0, 0.7, 1.2)[index % 3],
            "top_p": 0.9 if index % 4 == 0 else 1.0,
            "seed": index,
            "ignore_eos": long or index % 2 == 0,
            "return_token_ids": True,
        }
        stem, tail = stems[index % _STEMS], [rng.randrange(*scale.vocabulary) for _ in range(rng.randrange(1, 40))]
        if index % 3:
            body |= {"prompt": stem + tail, "n": 2 if index % 20 == 1 else 1}
            made.append(Prompt("/v1/completions", body, long))
        else:
            words = " ".join(map(str, stem[:24])), " ".join(map(str, tail[:8]))
            turns = [{"role": "system", "content": words[0]}, {"role": "user", "content": words[1]}]
            made.append(Prompt("/v1/chat/completions", {**body, "messages": turns}, long))
    return made


async def _usages_at_rest(cluster: Cluster, before: dict[str, Usage] | None) -> dict[str, Usage]:
    """Return the resources of every process once idle connections are closed, or after a timeout."""
    ends = time.monotonic() + 15.0
    await asyncio.sleep(4.0)
    while True:
        found = usages(cluster)
        if before is None or not _grown(before, found) or time.monotonic() > ends:
            return found
        await asyncio.sleep(0.5)


def _grown(before: dict[str, Usage], after: dict[str, Usage]) -> list[str]:
    """Return the processes that hold more than at the start, restarted ones included."""
    return [
        f"{name}: {before[name]} became {now}"
        for name, now in after.items()
        if now.descriptors > before[name].descriptors + _SPARE_DESCRIPTORS * (len(after) if name == "router" else 1)
        or now.threads > before[name].threads + _SPARE_THREADS
    ]


def _print_summary(run: Run) -> None:
    """Print a summary for the report."""
    report, done, watch = run.report, run.done, run.watch
    print(f"{report.requests} requests in {run.seconds:.1f} s, the slowest took {report.longest:.1f} s")
    for name, count in sorted(report.outcomes.items()):
        print(f"  {name}: {count}")
    print(*done.injected, sep="\n")
    print(f"{len(done.hits)} workers lost under {done.requests_hit} requests, {run.streams_broken} streams broken")
    print(f"at rest after {run.rested:.2f} s; {watch.samples} samples")
    print(f"at most {watch.most_requests} requests in flight; maximum of one worker: {watch.most_by_gauge}")
    print("workers together:", *(f"{name}={count}" for name, count in sorted(watch.counted().items())))
    resident = [size // _MIB for size in watch.resident_bytes]
    print(
        f"router: {resident[:: max(1, len(resident) // 12)]} MiB; {run.before['router']} became {run.after['router']}"
    )
    for violation in report.violations[:20]:
        print(f"  WRONG {violation}")


def _check(run: Run, scale: Scale) -> None:
    report, done, watch = run.report, run.done, run.watch
    assert not report.violations and not watch.violations, (report.violations[:5], watch.violations)
    assert report.requests >= scale.requests
    assert report.count("left") > 0.2 * report.requests
    for refused in report.refused:
        assert refused.code == "failed_twice", f"another worker could have served it: {refused}"
        gone = [*done.hits, *done.drained]
        assert _under(refused, done.hits), f"no worker was lost during it: {refused}, {done.hits}"
        assert _under(refused, gone) >= 2, f"fewer than two workers were lost during it: {refused}, {gone}"
    for broken in report.broken:
        assert broken.code == "worker_lost", broken
        assert _under(broken, done.hits), f"a stream broke that no lost worker served: {broken}, {done.hits}"
    # Requests that reached a worker between its last sample and its end are not counted there.
    assert len(report.broken) <= run.streams_broken <= done.requests_hit + 8 * len(done.hits)
    assert not (grown := _grown(run.before, run.after)), grown
    half = watch.resident_bytes[len(watch.resident_bytes) // 2]
    assert run.after["router"].resident_bytes < half + _SPARE_BYTES
    _check_work(watch.counted(), watch.cluster)


def _under(failed: Failed, gone: Sequence[tuple[float, float]]) -> int:
    """Return the number of workers lost while this request was in progress."""
    return sum(failed.began <= dead + _NOTICES_SECONDS and failed.ended >= before for before, dead in gone)


def _check_work(counted: Counter[str], cluster: Cluster) -> None:
    """Check the workers' own counters: every kind of work was done, and none of it wrong."""
    wrong = ('engine_finished_total{reason="error"}', "stale_outputs_total", "kv_transfer_dropped_frames_total")
    assert not any(counted[name] for name in (*wrong, 'prefills_elsewhere_total{outcome="damaged"}')), counted
    if any(worker.role == "decode" for worker in cluster.workers):
        assert counted['prefills_elsewhere_total{outcome="transferred"}'] > 0
        assert counted['prefills_elsewhere_total{outcome="held"}'] > 0
