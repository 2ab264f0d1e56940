"""A whole comparison: start the engines, measure the rounds, write what was measured after each of them."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from fd_core.cli.bench.compare import environments, machine, report, rounds, sessions, weights
from fd_core.cli.bench.compare.engines import ENGINES, ENVIRONMENTS, JUDGES, ComparedEngine, RunLimits
from fd_core.cli.bench.compare.processes import EngineFailedError
from fd_core.cli.bench.compare.stats import PeerRun, summarise
from fd_core.cli.bench.compare.workloads import SHAPES
from fd_core.config.outputs import require_writable
from fd_core.config.paths import find_cache_dir
from fd_core.errors import ConfigError, FdError
from fd_core.models.catalog import resolve_model

OUTPUT = "--output"


@dataclass(frozen=True, slots=True)
class Places:
    """Folders of a comparison: cached weights and logs, environments made here and those that the user named."""

    cache: Path
    given: Mapping[str, Path] = field(default_factory=dict)
    install: bool = False

    def start(
        self,
        engine: ComparedEngine,
        prepared: weights.PeerWeights,
        limits: RunLimits,
        console: Console,
        failures: dict[str, str],
        *,
        http: bool = False,
    ) -> sessions.PeerSession | None:
        """Start an engine and report it; on a failure record the cause in `failures` and return None."""
        logs = self.cache / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        try:
            with console.status(f"starting {engine.name}"):
                environment = ENVIRONMENTS[engine.environment]
                python = environments.find(
                    environment,
                    self.cache / "envs",
                    self.given,
                    install=self.install,
                    report=lambda text: console.print(f"{engine.name}: {text}", highlight=False, markup=False),
                )
                session = sessions.start(engine, python, prepared, limits, logs / f"{engine.name}.log", http=http)
        except (EngineFailedError, environments.EnvironmentFailedError) as error:
            failures[engine.name] = str(error)
            console.print(f"{engine.name}: not started: {error}", highlight=False, markup=False)
            return None
        console.print(f"{engine.name}: {session.version}, ready after {session.load_s:.1f} s", highlight=False)
        return session


def places(cache: Path | None, env: Sequence[str], *, install: bool) -> Places:
    """Return the folders that flags name. Raises `ConfigError` for `--env` without NAME=DIR of a known NAME."""
    given = [entry.partition("=") for entry in env]
    for name, equals, _ in given:
        if not equals or name not in ENVIRONMENTS:
            expected = f"NAME=DIR with NAME one of {', '.join(ENVIRONMENTS)}"
            raise ConfigError(f"{name!r} is not {expected}", field="--env")
    return Places(cache or find_cache_dir() / "compare", {name: Path(folder) for name, _, folder in given}, install)


def known(text: str, names: Mapping[str, Any], flag: str) -> list[str]:
    """Return the names in comma-separated `text`. Raises `ConfigError` for `flag` unless each is known."""
    chosen = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in chosen if name not in names]
    if unknown or not chosen:
        raise ConfigError(f"{', '.join(unknown) or 'nothing'} is not among {', '.join(names)}", field=flag)
    return chosen


_LOCAL = {"--env": 1, "--cache": 1, "--output": 1, "--install": 0, "--resume": 0}
"""Flags that name places of this machine or do not change a result, and the number of their values."""


def shown(command: Sequence[str]) -> str:
    """Return a command line without what holds on this machine only; of the path in --model its last part stays."""
    kept: list[str] = []
    words = iter(command)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in _LOCAL:
            if _LOCAL[flag] and not equals:
                next(words, "")
        elif flag == "--model":
            kept += [flag, Path(value if equals else next(words, "")).name]
        else:
            kept.append(word)
    return shlex.join(kept)


def warn_if_busy(console: Console) -> None:
    """Warn if other work is running."""
    if (load := machine.load_average()) > 0.5:
        console.print(f"other work is running (load average {load:.1f}): the figures will be noisy", style="yellow")


def announcer(console: Console) -> Callable[[str, str, int, PeerRun | str], None]:
    """Return a function that prints each result."""

    def announce(engine: str, workload: str, number: int, run: PeerRun | str) -> None:
        stage = f"round {number}" if number else "warm-up"
        result = run if isinstance(run, str) else f"{run.output_tps:.0f} tok/s, TPOT {run.tpot_s * 1e3:.1f} ms"
        console.print(f"{stage} {workload} {engine}: {result}", highlight=False, markup=False)

    return announce


def compare(
    console: Console,
    found: Places,
    *,
    engines: Sequence[str],
    workloads: Sequence[str],
    model: Path | None,
    command: str,
    count: int,
    threads: int,
    seed: int,
    http: bool,
    output: Path,
    resume: bool,
    warm_up: Sequence[str] | None,
) -> None:
    """Measure `count` rounds of every workload; write NAME.json, NAME.md and NAME.svg after each workload of a round.

    With `resume`, rounds that NAME.json has are kept; `ConfigError` if they were measured with other settings or on
    another machine. Raises `FdError` if no engine completed a round.
    """
    require_writable(output, OUTPUT)
    facts = machine.describe()
    mode = "servers over HTTP" if http else "in-process (llama.cpp: its server over HTTP)"
    settings = {"threads": threads, "seed": seed, "model": model and model.name, "mode": mode, "cpu": facts["cpu"]}
    before, used = _measured(output, settings) if resume else (rounds.Measurements(), {})
    warn_if_busy(console)
    prepared, corpus = weights.prepare(model or resolve_model("smollm2").path, found.cache / "models")
    shapes = [SHAPES[name] for name in workloads]
    limits = RunLimits(threads, max(shape.requests for shape in shapes), max(shape.longest for shape in shapes))
    failures: dict[str, str] = {}

    def finished(measured: rounds.Measurements) -> report.Comparison:
        return report.Comparison(
            command=command,
            mode=mode,
            date=f"{datetime.datetime.now(datetime.UTC):%B %Y}",
            reference=engines[0],
            machine=facts,
            settings=settings,
            threads=threads,
            weight_bytes=prepared.weight_bytes,
            engines=used,
            measurements=measured,
            summaries=summarise(
                measured.runs,
                reference=engines[0],
                judge=JUDGES,
                floor_s=prepared.weight_bytes / max(measured.bandwidths),
            ),
        )

    def save(measured: rounds.Measurements) -> None:
        measured.failures |= failures
        if measured.runs:
            report.write(finished(measured), output, OUTPUT)

    with ExitStack() as stack:
        started = []
        for name in engines:
            session = found.start(ENGINES[name], prepared, limits, console, failures, http=http)
            if session is not None:
                stack.callback(session.close)
                started.append(session)
                used[name] = {
                    "version": session.version,
                    "precision": session.engine.precision,
                    "load_s": session.load_s,
                    "notes": session.notes,
                }
        probe, announce = machine.BandwidthProbe(threads), announcer(console)
        measured = rounds.measure(
            started, workloads, count, corpus, seed, probe, announce, warm_up, result=before, save=save
        )
    if not measured.runs:
        raise FdError("no engine completed a round: " + "; ".join(f"{k}: {v}" for k, v in measured.failures.items()))
    save(measured)
    report.show(finished(measured), console)
    console.print(f"wrote {output}.json, {output}.md and {output}.svg", highlight=False)


def _measured(output: Path, settings: Mapping[str, Any]) -> tuple[rounds.Measurements, dict[str, Any]]:
    """Return the rounds of NAME.json and the engines that ran, nothing if there is no such file."""
    path = output.with_name(f"{output.name}.json")
    if not path.exists():
        return rounds.Measurements(), {}
    try:
        kept = msgspec.json.decode(path.read_bytes())
        measured, engines = msgspec.convert(kept["measurements"], rounds.Measurements), kept["engines"]
        differing = [name for name, value in settings.items() if kept["settings"][name] != value]
    except (msgspec.MsgspecError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is not a comparison: {error}", field=OUTPUT) from error
    if differing:
        raise ConfigError(
            f"{path} was measured with another {' and '.join(differing)}", field="--resume", hint="use another --output"
        )
    measured.failures.clear()
    return measured, engines
