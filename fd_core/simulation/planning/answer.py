"""The result of a search as values for tables, JSON and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fd_core.simulation.costs.profile import CostProfile
from fd_core.simulation.planning.limiting import LimitFound, check_margin, check_text, limit_of
from fd_core.simulation.planning.search import PlanSearch, PlanTrial
from fd_core.simulation.planning.shapes import DeploymentShape
from fd_core.simulation.results.comparing import SeedInterval, interval
from fd_core.simulation.results.report import Report, ReportedRun
from fd_core.simulation.results.slo import Slo
from fd_core.simulation.results.tables import duration_text


class PlanAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Subject of the search."""

    slo: str
    workload: str
    workload_text: str
    command: str
    priced: bool
    """True if costs are money; otherwise they count devices."""
    left_out: dict[str, str]
    """Excluded profiles, with the reason."""
    calculated: bool
    seeds: tuple[int, ...]


class PlanLimit(msgspec.Struct, frozen=True):
    """A limit of the SLO, and the value that a plan reaches."""

    name: str
    limit: float
    value: SeedInterval | None
    """Over seeds; None if, with one of them, too many requests never reached it."""
    margin: float
    """Of the worst seed, as a share of the limit."""


class PlanFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one plan."""

    plan: str
    shape: DeploymentShape
    units: int
    workers: int
    devices: int
    cost_per_hour: float
    checked: bool
    """True if it met the SLO on the whole workload with every seed."""
    seeds: int
    """Number of runs that the figures cover."""
    whole: bool
    """True if these runs used the whole workload, False for its first requests."""
    limits: tuple[PlanLimit, ...]
    margin: float
    kv_peak: float | None
    busy: float
    """Share of time that devices compute."""
    command: str


class LoadTried(msgspec.Struct, frozen=True):
    """The chosen plan at another load."""

    load: float
    margin: float
    nearest: str
    """The limit with the least margin."""


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Complete result of a search; also the schema of its JSON, which has the same bytes for the same search."""

    fdcore_plan: int
    asked: PlanAsked
    best: PlanFigures | None
    runners_up: tuple[PlanFigures, ...]
    below: PlanFigures | None
    """The chosen plan with one unit less, which violates the SLO."""
    closest: PlanFigures | None
    """The closest plan, if none meets the SLO."""
    holds_load: float | None
    breaks_load: float | None
    loads: tuple[LoadTried, ...]
    limit: LimitFound | None
    unfinished: str
    """Reason for an early end of the search; empty if it completed."""
    runs: int
    shapes: int
    shapes_excluded: int
    """Further shapes: a request alone already exceeds a limit, or they need more devices than available."""


def answer_of(
    asked: PlanAsked,
    search: PlanSearch,
    shapes: Sequence[DeploymentShape],
    runs: Mapping[PlanTrial, ReportedRun],
    profiles: Mapping[str, CostProfile],
    *,
    unfinished: str,
    excluded: int,
    runners_up: int,
) -> PlanAnswer:
    """Return the current result of a search."""
    ranking = search.ranking()

    def figures(shape: int, units: int, trials: Sequence[PlanTrial]) -> PlanFigures:
        return _figures(asked, shapes[shape], units, unit_cost=search.shapes[shape].cost, trials=trials, runs=runs)

    def known(shape: int, units: int) -> list[PlanTrial]:
        """Return the runs on the whole workload if there are any, else those on its first requests."""
        found = [each for each in runs if (each.shape, each.units, each.load) == (shape, units, 1.0)]
        return [each for each in found if each.whole] or found

    best = below = closest = limit = None
    loads: list[LoadTried] = []
    if ranking:
        chosen = ranking[0]
        units = search.units[chosen]
        best = figures(chosen, units, known(chosen, units))
        if (broken := search.breaks_below(chosen)) is not None:
            below = figures(chosen, broken.units, known(chosen, broken.units))
        tried = [each for each in runs if each.shape == chosen and each.units == units and each.load > 1]
        tried.sort(key=lambda each: each.load)
        for each in tried:
            slo = runs[each].summary.slo
            worst = min(slo.checks if slo else (), key=check_margin)
            loads.append(LoadTried(each.load, check_margin(worst), check_text(worst)))
        breaking = [each for each in tried if search.margins.get(each, 0) < 0]
        at, when = (breaking[0], f"at {breaking[0].load:g} times the load") if breaking else (None, "")
        if at is None and (broken := search.breaks_below(chosen)) is not None:
            at, when = broken, f"with {shapes[chosen].described(broken.units)}"
        if at is None and tried:
            at, when = tried[-1], f"at {tried[-1].load:g} times the load"
        at = at or max(known(chosen, units), key=lambda each: -search.margins[each])
        limit = limit_of(runs[at], shapes[chosen], profiles[shapes[chosen].profile], when=when or "as asked")
    elif search.margins:
        nearest = max(search.margins, key=lambda each: (search.margins[each], -each.units))
        closest = figures(nearest.shape, nearest.units, [nearest])
        about = shapes[nearest.shape]
        limit = limit_of(runs[nearest], about, profiles[about.profile], when=f"with {about.described(nearest.units)}")
    others = [figures(each, search.units[each], known(each, search.units[each])) for each in ranking[1:]]
    return PlanAnswer(
        fdcore_plan=1,
        asked=asked,
        best=best,
        runners_up=tuple(others[:runners_up]),
        below=below,
        closest=closest,
        holds_load=search.holds_load,
        breaks_load=search.breaks_load,
        loads=tuple(loads),
        limit=limit,
        unfinished=unfinished,
        runs=len(runs),
        shapes=len(shapes),
        shapes_excluded=excluded,
    )


def page_report(asked: PlanAsked, runs: Mapping[PlanTrial, ReportedRun], answer: PlanAnswer, slo: Slo) -> Report:
    """Return the runs as a report for a page: the plans compared, and the chosen one under other loads."""
    best = answer.best
    shown = {plan.plan for plan in (best, *answer.runners_up, answer.closest) if plan is not None}
    kept = [run for trial, run in runs.items() if trial.whole and run.setting in shown]
    kept = kept or [run for run in runs.values() if run.setting in shown]
    if best is not None:
        kept.sort(key=lambda run: run.setting != best.plan)
    facts = {"what limits": answer.limit.words if answer.limit else "no plan was tried"}
    return Report(
        title=f"Plan: {_headline(answer)}",
        runs=tuple(kept),
        slo=slo,
        settings={**facts, "workload": asked.workload, "runs": str(answer.runs)},
        command=asked.command,
    )


def print_answer(answer: PlanAnswer, console: Console) -> None:
    """Print the plans, then their evidence in sentences."""
    asked = answer.asked
    if asked.calculated:
        warning = (
            "CALCULATED, NEVER MEASURED: this plan was not run on a device. Trust the order of plans more than "
            "their seconds, and measure before buying hardware."
        )
        console.print(Text(warning, "bold yellow"))
    for name, reason in asked.left_out.items():
        console.print(Text(f"Excluded: {name}: {reason}", "yellow"))
    if answer.unfinished:
        console.print(Text(f"NOT COMPLETE, best result so far: {answer.unfinished}", "bold yellow"))
    plans = [plan for plan in (answer.best, *answer.runners_up, answer.below, answer.closest) if plan is not None]
    if plans:
        table = Table(title=f"Plans for {asked.slo}", title_justify="left", box=None, padding=(0, 1, 0, 0))
        names = [each.name for each in plans[0].limits]
        # Without prices the cost of a plan is its devices.
        costs = ("Cost\nan hour",) if asked.priced else ()
        for name in ("Workers", "Batch,\nbudget", "Devices", *costs, *names, "Margin", "Seeds"):
            workers = name == "Workers"
            table.add_column(name, justify="left" if workers else "right", overflow="fold", no_wrap=workers)
        for plan in plans:
            style = "bold green" if plan is answer.best else "red" if plan.margin < 0 else ""
            row = (
                plan.shape.workers_text(plan.units).replace(" + ", "\n+ ").replace(" x ", "\nx "),
                f"{plan.shape.max_num_seqs},\n{plan.shape.max_num_batched_tokens}",
                f"{plan.devices}",
                *([f"{plan.cost_per_hour:,.6g}"] if asked.priced else []),
                *map(_limit_text, plan.limits),
                _margin_text(plan.margin),
                f"{plan.seeds}{'' if plan.whole else ', short'}",
            )
            table.add_row(*map(Text, row), style=style)
        console.print(table)
    console.print(Text(_headline(answer), "bold green" if answer.best else "bold red"))
    if answer.best is not None:
        margins = ", ".join(f"{each.name} {_margin_text(each.margin)}" for each in answer.best.limits)
        console.print(Text(f"Margin to each limit, in the worst of {answer.best.seeds} seeds: {margins}."))
    if answer.below is not None:
        below = answer.below
        console.print(Text(f"One unit less violates it: {below.plan}, margin {_margin_text(below.margin)}."))
    if answer.limit is not None:
        console.print(Text(answer.limit.words))
    if answer.best is not None:
        console.print(Text(f"Reproduce it: {answer.best.command}"))
    out = f"; {answer.shapes_excluded} more were excluded without a simulation" if answer.shapes_excluded else ""
    console.print(Text(f"{answer.runs} simulations of {answer.shapes} kinds of deployment{out}.", "dim"))


def _headline(answer: PlanAnswer) -> str:
    best = answer.best
    if best is None:
        return f"None of the tried plans meets {answer.asked.slo}."
    sure = "holds" if best.checked else "meets, as far as it was tried,"
    words = f"{best.plan}: {best.devices} device{'s' if best.devices > 1 else ''}, {sure} {answer.asked.slo}"
    if answer.holds_load is None:
        return f"{words}."
    if answer.breaks_load is None:
        return f"{words}, up to at least {answer.holds_load:g} times the load."
    return f"{words}, up to {answer.holds_load:g} times the load; it fails at {answer.breaks_load:g} times."


def _figures(
    asked: PlanAsked,
    shape: DeploymentShape,
    units: int,
    unit_cost: float,
    trials: Sequence[PlanTrial],
    runs: Mapping[PlanTrial, ReportedRun],
) -> PlanFigures:
    summaries = [runs[trial].summary for trial in trials]
    limits = []
    for checks in zip(*(summary.slo.checks for summary in summaries if summary.slo), strict=True):
        values = [check.value for check in checks if check.value is not None]
        found = interval(values) if len(values) == len(checks) else None
        limits.append(PlanLimit(checks[0].name, checks[0].limit, found, margin=min(map(check_margin, checks))))
    seconds = sum(len(each.workers) * each.seconds for each in summaries)
    busy = sum(each.counters.get("device_busy_seconds", 0.0) for each in summaries) / seconds if seconds else 0.0
    margin = min((each.margin for each in limits), default=0.0)
    whole = all(trial.whole for trial in trials)
    return PlanFigures(
        plan=shape.described(units),
        shape=shape,
        units=units,
        workers=shape.workers * units,
        devices=shape.devices * units,
        cost_per_hour=unit_cost * units,
        checked=whole and len(trials) == len(asked.seeds) and margin >= 0,
        seeds=len(trials),
        whole=whole,
        limits=tuple(limits),
        margin=margin,
        kv_peak=max((each.kv_peak for each in summaries if each.kv_peak is not None), default=None),
        busy=busy,
        command=f"fdcore simulate {asked.workload_text} {' '.join(shape.flags(units))} --slo {asked.slo}",
    )


def _limit_text(each: PlanLimit) -> str:
    if each.value is None:
        return "never"
    show = (lambda value: f"{value:.1%}") if each.name == "attainment" else duration_text
    if each.value.low is None or each.value.high is None or each.value.low == each.value.high:
        return show(each.value.mean)
    return f"{show(each.value.mean)}\n± {show((each.value.high - each.value.low) / 2)}"


def _margin_text(margin: float) -> str:
    return f"{margin:+.0%}" if margin > -10 else "never"
