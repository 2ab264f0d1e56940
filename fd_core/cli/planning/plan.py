"""`fdcore plan`: the cheapest deployment that meets an SLO, found by search over simulations."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fd_core.cli.report import INTERRUPTED, interrupts_end_it, reports_errors
from fd_core.cli.settings.flags import ENGINE_FLAGS, Given, takes_flags
from fd_core.errors import ConfigError

if TYPE_CHECKING:
    from fd_core.simulation.costs.profile import CostProfile
    from fd_core.simulation.planning.bounds import Demand
    from fd_core.simulation.planning.search import PlanSearch, PlanShape, PlanTrial
    from fd_core.simulation.planning.shapes import DeploymentShape, PlanJob
    from fd_core.simulation.results.report import ReportedRun
    from fd_core.simulation.results.slo import Slo
    from fd_core.simulation.workloads.workload import Workload


_GIVEN: Final = frozenset(
    """
    max_model_len block_size num_kv_blocks kv_cache_memory enable_prefix_caching scheduler scheduling_policy
    victim_policy pipeline_depth
    """.split()
)
_ENGINE: Final = tuple(flag for flag in ENGINE_FLAGS if flag.field in _GIVEN)


@reports_errors
@takes_flags(_ENGINE)
def plan(
    given: Given,
    slo: Annotated[
        str,
        typer.Option(metavar="LIMITS", help="Service level objective in seconds, such as ttft_p99=0.5,tpot_p99=0.05."),
    ],
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="Workload, as for `fdcore simulate`. See docs/study/workloads.md.",
        ),
    ] = None,
    trace_file: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Instead of WORKLOAD, a trace of `fdcore serve --trace`, or of another kind: mooncake:FILE.",
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROFILE",
            help="Cost profile of steps, as for `fdcore simulate`; several are alternatives.",
        ),
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="D1,D2", help="Devices to calculate profiles for, such as h100.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Model of calculated profiles, such as llama-70b.")
    ] = None,
    tp: Annotated[str, typer.Option(metavar="N1,N2", help="Tensor parallel sizes of calculated profiles.")] = "1,2,4,8",
    roles: Annotated[
        str,
        typer.Option(metavar="R1,R2", help="`mixed` workers, or prefill and decode workers in a ratio such as 1:2."),
    ] = "mixed,1:1,1:2,2:1",
    max_num_seqs: Annotated[
        str, typer.Option(metavar="N1,N2", help="Batch sizes to try. [default: the profile's]")
    ] = "",
    max_num_batched_tokens: Annotated[
        str, typer.Option(metavar="N1,N2", help="Step token budgets to try. [default: the profile's]")
    ] = "",
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MONEY", help="Price of a device per hour; DEVICE=MONEY for each if there are several kinds."
        ),
    ] = None,
    max_devices: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Largest number of devices.")] = 64,
    max_runs: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Largest number of simulations.")] = 300,
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, max=1e6, help="Time limit of the search.")
    ] = 900.0,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1024, help="Processes. [default: one per CPU core]")
    ] = None,
    first: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Requests of the first simulation of a candidate; the result is simulated with all requests.",
        ),
    ] = 200,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="First seed of workload and routers.")] = 0,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Seeds to verify the result with.")] = 3,
    runners_up: Annotated[int, typer.Option(metavar="N", min=0, max=20, help="Number of further plans to show.")] = 3,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="HTML page that shows the plans.")] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="File for the result; - is stdout.")
    ] = None,
) -> None:
    """Find the cheapest number and kind of workers that meet an SLO, by simulating the production engine.

    Equal arguments give equal results, for any number of processes, unless the time or run limit is reached. Ctrl-C
    shows the best plan so far. Exit code 1: no plan meets the SLO.
    """
    with interrupts_end_it():
        from rich.console import Console

        from fd_core.cli.planning.simulate import parse_given
        from fd_core.config.outputs import require_writable, write_json
        from fd_core.simulation.planning.answer import PlanAsked, answer_of, page_report, print_answer
        from fd_core.simulation.planning.bounds import demand_of
        from fd_core.simulation.planning.search import PlanSearch
        from fd_core.simulation.planning.shapes import parse_roles, setup_of, shapes_of
        from fd_core.simulation.results.slo import parse_slo
        from fd_core.simulation.workloads.workload import read_workload

    require_writable(page, "--page")
    require_writable(json, "--json")
    limits, began = parse_slo(slo), time.monotonic()
    text = _workload_text(workload, trace_file)
    engine = parse_given(given)
    profiles, left_out = _profiles(profile or [], devices, model, tp=tp)
    prices = _prices(price or [], profiles)
    shapes = shapes_of(
        profiles,
        parse_roles(roles),
        _numbers(max_num_seqs, "--max-num-seqs"),
        budgets=_numbers(max_num_batched_tokens, "--max-num-batched-tokens"),
    )
    # Contradictions are reported before anything runs.
    longest = {}
    for shape in shapes:
        made = setup_of(shape, 1, profiles[shape.profile], given=engine).deployment(shape.described(1))
        longest[shape] = min(group.limits.max_model_len for group in made.groups)
    asked = read_workload(text, seed)
    demand = demand_of(asked)
    possible = _possible(limits, profiles, demand, longest=longest)
    sizes, kept = _sized(profiles, demand, limits, prices, max_devices, possible, len(longest))
    search = PlanSearch(
        sizes,
        range(seed, seed + seeds),
        shortened=len(demand.new_tokens) > first,
        runners_up=runners_up,
        most_load=_most_load(asked),
    )
    about = PlanAsked(
        slo=str(limits),
        workload=asked.description,
        workload_text=shlex.quote(text),
        command=shlex.join(["fdcore", *sys.argv[1:]]),
        priced=bool(price),
        left_out=left_out,
        calculated=any(each.origin == "calculated" for each in profiles.values()),
        seeds=search.seeds,
    )
    searching = _Searching(
        search, kept, engine, text, first, demand.rate or 1.0, limits, prices, max_runs, began + time_limit
    )
    unfinished = searching.go(jobs or len(os.sched_getaffinity(0)), Console(stderr=True))
    answer = answer_of(
        about,
        search,
        kept,
        runs=searching.runs,
        profiles=profiles,
        unfinished=unfinished,
        excluded=len(shapes) - len(kept),
        runners_up=runners_up,
    )
    if json is None or str(json) != "-":
        print_answer(answer, Console())
    write_json(json, answer)
    if page is not None and searching.runs:
        from fd_core.simulation.results.page.pack import write_page

        write_page(page, page_report(about, searching.runs, answer, slo=limits))
    if unfinished == _INTERRUPTED:
        raise typer.Exit(INTERRUPTED)
    if answer.best is None:
        raise typer.Exit(1)


_INTERRUPTED: Final = "interrupted"


@dataclass(slots=True)
class _Searching:
    """Drives a search: makes jobs of its trials, shows its progress, and stops at its limits."""

    search: PlanSearch
    shapes: Sequence[DeploymentShape]
    engine: dict[str, Any]
    workload: str
    first: int
    rate: float
    slo: Slo
    prices: Mapping[str, float]
    max_runs: int
    deadline: float
    runs: dict[PlanTrial, ReportedRun] = field(default_factory=dict)

    def go(self, jobs: int, console: Any) -> str:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from fd_core.cli.planning.plan_processes import OutOfTime, PlanProcesses
        from fd_core.simulation.planning.limiting import slo_margin

        processes = PlanProcesses(jobs, self.deadline)
        columns = (
            SpinnerColumn(),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        trials, margins = self.search.trials(), None
        try:
            with Progress(*columns, console=console, transient=True) as bar:
                task = bar.add_task("simulations at most", total=self.max_runs)
                while True:
                    batch = next(trials) if margins is None else trials.send(margins)
                    bar.update(task, description=self._described(batch))
                    if len(self.runs) + len(batch) > self.max_runs:
                        return f"limit of {self.max_runs} simulations reached (--max-runs)"
                    found = processes.run([self._job(trial) for trial in batch], lambda: bar.advance(task))
                    self.runs |= zip(batch, found, strict=True)
                    margins = [slo_margin(run) for run in found]
        except StopIteration:
            return ""
        except OutOfTime:
            return "time limit reached (--time-limit)"
        except KeyboardInterrupt:
            return _INTERRUPTED
        finally:
            processes.close()

    def _described(self, batch: Sequence[PlanTrial]) -> str:
        trial, ranking = batch[0], self.search.ranking()
        best = ""
        if ranking:
            best = f"; best: {self.shapes[ranking[0]].described(self.search.units[ranking[0]])}"
        what = "all requests" if trial.whole else f"first {self.first} requests"
        return f"{what}{f', {trial.load:g} times the load' if trial.load != 1 else ''}{best}"

    def _job(self, trial: PlanTrial) -> PlanJob:
        from fd_core.simulation.planning.shapes import PlanJob

        shape = self.shapes[trial.shape]
        return PlanJob(
            shape=shape,
            units=trial.units,
            engine=self.engine,
            workload=self.workload,
            seed=trial.seed,
            requests=None if trial.whole else self.first,
            load=trial.load,
            rate=round(self.rate * trial.load, 6),
            slo=self.slo,
            price=self.prices[shape.profile] * shape.ranks,
        )


def _workload_text(workload: str | None, trace_file: str | None) -> str:
    from fd_core.simulation.workloads.settings import KINDS

    if (workload is None) == (trace_file is None):
        message = "no workload was specified" if workload is None else "a workload and a trace exclude each other"
        hint = "for example poisson:rate=4,requests=1000, or --trace FILE"
        raise ConfigError(message, field="WORKLOAD" if workload is None else "--trace", hint=hint)
    if trace_file is None:
        return str(workload)
    return trace_file if trace_file.partition(":")[0] in KINDS else f"trace:{trace_file}"


def _numbers(text: str, flag: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isascii() and word.isdecimal() and 1 <= int(word) <= 1 << 20 for word in words):
        raise ConfigError(f"{flag}: expected integers from 1, got {text!r:.60}", field=flag, hint="for example 64,256")
    return list(dict.fromkeys(map(int, words)))


def _profiles(
    named: Sequence[str], devices: str | None, model: str | None, tp: str
) -> tuple[dict[str, CostProfile], dict[str, str]]:
    """Return the profiles by name, and the reasons why combinations of devices and sizes were skipped."""
    from fd_core.simulation.costs.naming import profile_named

    if (devices is None) != (model is None):
        raise ConfigError(
            "--devices and --model must be used together", field="--devices", hint="for example h100 and llama-70b"
        )
    found = {name: profile_named(name) for name in named}
    left_out: dict[str, str] = {}
    for device in (devices or "").split(",") if devices else []:
        for size in _numbers(tp, "--tp"):
            name = f"{device.strip()}:{model}:tp={size}"
            try:
                found[name] = profile_named(name)
            except ConfigError as error:
                left_out[name] = error.message
                if "is known to calculate" in error.message:
                    raise
    if not found:
        hint = "for example --profile h100:llama-70b:tp=4, or --devices h100 --model llama-70b"
        raise ConfigError("; ".join(left_out.values()) or "no profile was specified", field="--profile", hint=hint)
    return found, left_out


def _prices(given: Sequence[str], profiles: Mapping[str, CostProfile]) -> dict[str, float]:
    """Return the price of a device of each profile. Raises `ConfigError` if one has none and another has."""
    by_kind: dict[str, float] = {}
    for text in given:
        kind, _, number = text.rpartition("=")
        try:
            by_kind[kind] = float(number)
        except ValueError:
            by_kind[kind] = -1.0
        if not 0 < by_kind[kind] < 1e9:
            raise ConfigError(
                f"--price: expected a price above 0, got {text!r:.60}", field="--price", hint="2.5, or h100=2.5"
            )
    kinds = {name: name.partition(":")[0] for name in profiles}
    if len(set(kinds.values())) == 1 and not given:
        return dict.fromkeys(profiles, 1.0)
    for name, kind in kinds.items():
        if kind not in by_kind and ("" not in by_kind or len(set(kinds.values())) > 1):
            message = f"{name} has no price, which is required to compare different devices"
            raise ConfigError(message, field="--price", hint=f"set --price {kind}=2.5 for each kind")
    return {name: by_kind.get(kind, by_kind.get("", 1.0)) for name, kind in kinds.items()}


def _most_load(workload: Workload) -> float:
    """Return the largest factor of a load among those that are tried."""
    from fd_core.simulation.planning.search import LOADS

    for load in reversed(LOADS):
        try:
            workload.scaled(load)
        except ConfigError:
            continue
        return load
    return 1.0


def _possible(
    slo: Slo, profiles: Mapping[str, CostProfile], demand: Demand, longest: Mapping[DeploymentShape, int]
) -> list[DeploymentShape]:
    """Return the shapes that meet every limit for a single request. Raises `ConfigError` if none does."""
    from fd_core.simulation.planning.bounds import least_possible

    if not len(demand.new_tokens):
        raise ConfigError("the workload contains no requests", field="WORKLOAD", hint="increase its duration")
    most, possible = max(longest.values()), list(longest)
    for each in slo.objectives:
        least = {
            shape: least_possible(
                each, profiles[shape.profile], demand, shape.max_num_batched_tokens, slo.attainment or 1.0, length
            )
            for shape, length in longest.items()
        }
        best = min(least, key=least.__getitem__)
        if least[best] == math.inf:
            count = int((demand.prompt_tokens >= most).sum())
            raise ConfigError(
                f"no plan can meet {each.name}={each.limit:g}: {count:,} of {len(demand.prompt_tokens):,} prompts "
                f"have {most:,} tokens or more, and every worker rejects them",
                field="--max-model-len",
                hint="increase it as far as the model and KV blocks allow, or remove such requests",
            )
        if least[best] > each.limit:
            raise ConfigError(
                f"no plan can meet {each.name}={each.limit:g}: with a single request per worker it is at least "
                f"{least[best]:.4g} s, with {best.profile} ({profiles[best.profile].label})",
                field="--slo",
                hint=f"allow more than {least[best]:.4g}, or use faster devices or a larger --tp",
            )
        possible = [shape for shape in possible if least[shape] <= each.limit]
    return possible


def _sized(
    profiles: Mapping[str, CostProfile],
    demand: Demand,
    slo: Slo,
    prices: Mapping[str, float],
    max_devices: int,
    possible: Sequence[DeploymentShape],
    kinds: int,
) -> tuple[list[PlanShape], list[DeploymentShape]]:
    """Return those of `kinds` shapes that may meet the SLO, with bounds. Raises `ConfigError` if there is none."""
    from fd_core.simulation.planning.bounds import fewest_workers
    from fd_core.simulation.planning.search import PlanShape

    sizes: list[PlanShape] = []
    kept: list[DeploymentShape] = []
    fewest_devices: list[int] = []
    for shape in possible:
        limits = (shape.max_num_seqs, shape.max_num_batched_tokens)
        mixed, prefill, decode = fewest_workers(profiles[shape.profile], demand, slo, *limits)
        least = max(-(-prefill // shape.prefill), -(-decode // shape.decode)) if shape.prefill else mixed
        fewest_devices.append(least * shape.devices)
        if least * shape.devices > max_devices:
            continue
        sizes.append(PlanShape(prices[shape.profile] * shape.devices, least, max_devices // shape.devices))
        kept.append(shape)
    if not kept:
        needed = min(fewest_devices, default=0)
        message = f"none of {kinds} kinds of deployment meets {slo} with {max_devices} devices: " + (
            f"at least {needed} are needed" if needed else "each is too slow even for a single request"
        )
        raise ConfigError(message, field="--max-devices" if needed else "--slo")
    return sizes, kept
