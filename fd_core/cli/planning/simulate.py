"""`fdcore simulate`: performance of a deployment under a load, on a simulated device."""

from __future__ import annotations

import gc
import itertools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fd_core.cli.report import interrupts_end_it, reports_errors
from fd_core.cli.settings.flags import ENGINE_FLAGS, ROUTER_FLAGS, Given, takes_flags
from fd_core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from fd_core.simulation.results.report import ReportedRun
    from fd_core.simulation.results.slo import Slo
    from fd_core.simulation.setups import Setup
    from fd_core.simulation.workloads.workload import Workload


_STUDIED: Final = frozenset(
    """
    max_model_len max_num_seqs max_num_batched_tokens block_size num_kv_blocks kv_cache_memory enable_prefix_caching
    scheduler scheduling_policy victim_policy pipeline_depth speculative save_preempted_kv host_kv_memory
    kv_store_timeout watchdog_seconds kv_events lease_seconds trace trace_limit
    """.split()
)
_ENGINE: Final = tuple(flag for flag in ENGINE_FLAGS if flag.field in _STUDIED)
_ROUTER: Final = tuple(flag for flag in ROUTER_FLAGS if "config" not in flag.field)
_FLAGS: Final = {flag.field: flag for flag in (*_ROUTER, *_ENGINE)}
_COUNTS: Final = ("workers", "prefill", "decode", "routers")
"""Counts in `Setup` that may be varied."""
_LOAD: Final = "load"


_Choice = tuple[str, tuple[str, Any]]
"""A setting, and one of its values: as text, and parsed."""


@reports_errors
@takes_flags(_ENGINE, _ROUTER)
def simulate(
    given: Given,
    workload: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD",
            help="Workload: KIND:key=value,... such as poisson:rate=4,requests=1000, a recorded trace such "
            "as mooncake:FILE, or a TOML or JSON file with the same keys. See docs/study/workloads.md.",
        ),
    ] = "poisson:rate=2,requests=500",
    profile: Annotated[
        str,
        typer.Option(
            metavar="PROFILE",
            help="Cost profile of steps: one that `fdcore calibrate` wrote, a file, or DEVICE:MODEL to calculate one, "
            "such as h100:llama-70b:tp=8.",
        ),
    ] = "smollm2-cpu",
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Workers that prefill and decode. [default: 1]")
    ] = None,
    prefill: Annotated[int, typer.Option(metavar="N", help="Prefill workers, of pairs.")] = 0,
    decode: Annotated[int, typer.Option(metavar="N", help="Decode workers, of pairs.")] = 0,
    routers: Annotated[
        int | None, typer.Option(metavar="N", help="Routers; a single worker has none by default.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=V1,V2",
            help="Run with each value of a setting: any flag of this command without its dashes, workers, prefill, "
            "decode, routers, profile, or load, which scales the arrival rate. Several --vary run all combinations.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="First seed of workload and routers.")] = 0,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Runs of each setting, with consecutive seeds.")
    ] = 1,
    slo: Annotated[
        str | None,
        typer.Option(metavar="LIMITS", help="Service level objective in seconds, such as ttft_p99=0.5,tpot_p99=0.05."),
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="FIGURE", help="Metric by which settings are compared, such as ttft_p99.")
    ] = None,
    price: Annotated[float | None, typer.Option(metavar="MONEY", min=0, help="Price of a worker per hour.")] = None,
    acceptance: Annotated[
        float,
        typer.Option(
            metavar="SHARE", min=0, max=1, help="Acceptance probability of a draft token, for --speculative-config."
        ),
    ] = 0.7,
    shared_store: Annotated[
        bool, typer.Option("--shared-store", help="Share KV between all workers through a store.")
    ] = False,
    latency: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Network latency.")] = 0.0002,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="HTML report.")] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="File for all results; - is stdout.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Verify every token of every answer.")] = True,
) -> None:
    """Simulate a deployment: the production scheduler, router, KV accounting and admission under a virtual clock.

    Only the device, the network and the time are simulated. Equal arguments give equal results, byte for byte. A
    custom scheduler or policy may be a file: --scheduler mine.py:MyScheduler, which `fdcore serve` accepts, too.
    """
    with interrupts_end_it():
        from rich.console import Console

        from fd_core.config.outputs import require_writable, write_json
        from fd_core.simulation.costs.naming import profile_named
        from fd_core.simulation.results.comparing import figure_named
        from fd_core.simulation.results.report import Report, report_document
        from fd_core.simulation.results.slo import parse_slo
        from fd_core.simulation.results.tables import print_report
        from fd_core.simulation.setups import Setup
        from fd_core.simulation.workloads.workload import read_workload

    require_writable(page, "--page")
    require_writable(json, "--json")
    limits = None if slo is None else parse_slo(slo)
    if by is not None:
        figure_named(by, slo=limits is not None, price=price is not None)
    asked, axes = read_workload(workload, seed), [_axis(text) for text in vary or ()]
    _require_distinct(axes)
    settings = parse_given(given)
    setup = Setup(
        profile=profile_named(profile),
        workers=(0 if prefill or decode else 1) if workers is None else workers,
        prefill=prefill,
        decode=decode,
        routers=routers,
        engine={name: value for name, value in settings.items() if name in _STUDIED},
        router={name: value for name, value in settings.items() if name not in _STUDIED},
        acceptance=acceptance,
        shared_store=shared_store,
        latency=latency,
    )
    console = Console(stderr=True)
    _require_known_policies(setup, axes)
    runs = _run_all(setup, axes, workload, range(seed, seed + seeds), limits, price, check, console)
    report = Report(
        title=asked.description,
        runs=tuple(runs),
        slo=limits,
        settings={
            "profile": setup.profile.label,
            "workload": asked.description,
            **{name: str(value) for name, value in settings.items()},
        },
        command=shlex.join(["fdcore", *sys.argv[1:]]),
        by=by,
        traces={"steps": str(settings["trace"])} if "trace" in settings else {},
    )
    if json is None or str(json) != "-":
        print_report(report, Console())
    write_json(json, report_document(report))
    if page is not None:
        from fd_core.simulation.results.page.pack import write_page

        write_page(page, report)


def parse_given(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parsed values of flags. Raises `ConfigError` for an invalid one."""
    return {name: _parsed(name, value) for name, value in given.items()}


def _parsed(name: str, value: Any) -> Any:
    try:
        return _FLAGS[name].parse(value)
    except ValueError as error:
        raise ConfigError(f"{_FLAGS[name].flag}: {error}", field=_FLAGS[name].flag) from error


def _axis(text: str) -> list[_Choice]:
    """Read NAME=V1,V2. Raises `ConfigError` for a setting that cannot be varied."""
    from fd_core.simulation.costs.naming import profile_named

    name, mark, listed = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    words = [word.strip() for word in listed.split(",") if word.strip()]
    if not mark or not words:
        raise ConfigError(f"--vary {text!r:.80} has no values", field="--vary", hint="for example max_num_seqs=8,16,32")
    readers: dict[str, Callable[[str], Any]] = {
        **{flag: partial(_parsed, flag) for flag in _FLAGS},
        **dict.fromkeys(_COUNTS, int),
        "profile": profile_named,
        _LOAD: _factor,
    }
    if name not in readers:
        hint = f"use one of {', '.join(sorted(readers))}"
        raise ConfigError(f"{name!r:.60} is not a setting that can be varied", field="--vary", hint=hint)
    try:
        read = [(word, readers[name](word)) for word in words]
    except ValueError:
        raise ConfigError(f"--vary {name}: expected numbers above 0, got {listed!r:.80}", field="--vary") from None
    for index, (word, value) in enumerate(read):
        if any(value == other for _, other in read[:index]):
            hint = "use --seeds for several runs of a setting"
            raise ConfigError(f"--vary {name}: the value {word!r:.60} is repeated", field="--vary", hint=hint)
    return [(name, choice) for choice in read]


def _require_distinct(axes: Sequence[Sequence[_Choice]]) -> None:
    names = [axis[0][0] for axis in axes]
    for name in names:
        if names.count(name) > 1:
            words = ",".join(word for axis in axes for each, (word, _) in axis if each == name)
            hint = f"list all values at once: --vary {name}={words}"
            raise ConfigError(f"--vary {name} is repeated", field="--vary", hint=hint)


def _factor(word: str) -> float:
    value = float(word)
    if not 0 < value < 1e6:
        raise ValueError(word)
    return value


def _require_known_policies(setup: Setup, axes: Sequence[Sequence[_Choice]]) -> None:
    """Raise `PluginError` for an unknown scheduler or policy, before anything is simulated."""
    from fd_core.plugins import ROUTER_POLICY, SCHEDULER, SCHEDULING_POLICY, VICTIMS, Kind, installed_plugins

    kinds: dict[str, Kind[Any]] = {
        "scheduler": SCHEDULER,
        "scheduling_policy": SCHEDULING_POLICY,
        "victim_policy": VICTIMS,
        **dict.fromkeys(("policy", "prefill_policy", "decode_policy"), ROUTER_POLICY),
    }
    named = [*setup.engine.items(), *setup.router.items()]
    named += [(name, value) for axis in axes for name, (_, value) in axis]
    for name, value in named:
        if name in kinds:
            installed_plugins().load(kinds[name], str(value))


def _changed(setup: Setup, chosen: Mapping[str, tuple[str, Any]]) -> Setup:
    engine, router, own = dict(setup.engine), dict(setup.router), {}
    for name, (_, value) in chosen.items():
        if name == _LOAD:
            continue
        if name in _STUDIED:
            engine[name] = value
        elif name in _FLAGS:
            router[name] = value
        else:
            own[name] = value
    return replace(setup, engine=engine, router=router, **own)


def _run_all(
    setup: Setup,
    axes: Sequence[Sequence[_Choice]],
    workload: str,
    seeds: range,
    slo: Slo | None,
    price: float | None,
    check: bool,
    console: Console,
) -> list[ReportedRun]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from fd_core.plugins import installed_plugins
    from fd_core.simulation.results.report import reported
    from fd_core.simulation.workloads.workload import read_workload
    from fd_core.simulation.world import World

    combinations = [dict(choices) for choices in itertools.product(*axes)]
    total = len(combinations) * len(seeds)
    if total > 1 and setup.engine.get("trace"):
        raise ConfigError("several runs cannot write the same trace", field="--trace", hint="remove --vary and --seeds")
    if total > 10_000:
        raise ConfigError(f"{total:,} runs exceed the limit of 10,000", field="--vary")
    # Contradictions are reported before anything runs.
    cases = [(chosen, _changed(setup, chosen)) for chosen in combinations]
    for chosen, changed in cases:
        changed.deployment(_label(chosen))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    runs: list[ReportedRun] = []
    gc.set_threshold(50_000, 50, 100)  # a simulation creates few reference cycles
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=None)
        for chosen, changed in cases:
            for seed in seeds:
                asked = read_workload(workload, seed)
                if _LOAD in chosen:
                    asked = asked.scaled(chosen[_LOAD][1])
                bar.reset(task, total=asked.num_requests, description=f"run {len(runs) + 1} of {total}")
                world = World(changed.deployment(_label(chosen), check=check), installed_plugins(), seed)

                def ended(world: World = world) -> None:
                    if len(world.outcomes) % 50 == 0:
                        bar.update(task, completed=len(world.outcomes))

                world.on_event = ended
                runs.append(
                    reported(
                        world.run(asked),
                        _label(chosen),
                        _values(chosen, asked),
                        slo=slo,
                        price_per_worker_hour=price,
                        devices_per_worker=changed.profile.ranks,
                    )
                )
    return runs


def _label(chosen: Mapping[str, tuple[str, Any]]) -> str:
    words = [f"{name}={Path(word).name}" for name, (word, value) in chosen.items() if not _is_number(value)]
    return ", ".join(words) or "as specified"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _values(chosen: Mapping[str, tuple[str, Any]], workload: Workload) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, (_, value) in chosen.items():
        if name == _LOAD and workload.settings.rate:
            found["rate"] = float(workload.settings.rate)
        elif _is_number(value):
            found[name] = float(value)
    return found
