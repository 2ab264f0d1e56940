"""Run every check and measurement for an NVIDIA GPU, item by item; a failed item does not stop the others.

    nox -s gpu
    python benchmarks/gpu_session.py [--only hardware first-hour] [--results FOLDER]

The first installs the dependencies of the second, and runs it. Without a GPU it runs the items that need none, lists
the skipped commands with the reason, and exits with 0. With one, it exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from fd_core.plugins import BACKEND, installed_plugins

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "plugins" / "gpu_cuda"
RESULTS = ROOT / "benchmarks" / "results"
ITEM_TIMEOUT = 3600
"""Seconds after which an item counts as failed."""
FORMS = (
    "gpu_cuda",
    "gpu_cuda:dtype=float32",
    "gpu_cuda:dtype=float16",
    "gpu_cuda:quantization=int8",
    "gpu_cuda:quantization=int4",
    "gpu_cuda:kv_cache_dtype=int8",
    "gpu_cuda:attention_backend=torch",
)


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to run."""

    name: str
    shows: str
    command: tuple[str, ...]
    backend: str = ""
    """Backend that must be available; empty if no GPU is needed."""
    modules: tuple[str, ...] = ()
    """Modules that must be installed."""
    after: str = ""
    """Item whose output this one reads."""
    folder: Path = ROOT
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an item."""

    item: str
    result: str
    """`passed`, `failed` or `not run`."""
    why: str = ""
    seconds: float = 0.0


def items(results: Path) -> tuple[Item, ...]:
    """Return the items in the order in which they run: cheap and informative ones first."""
    python = sys.executable
    measured = str(results / "gpu_first_hour.json")
    fdcore = (python, "-m", "fd_core.cli", "conformance")
    roofline = (python, "benchmarks/gpu_roofline.py", "--results", str(results))
    pytest = (python, "-m", "pytest", "-q")
    compile_tests = sorted(str(path.relative_to(PLUGIN)) for path in PLUGIN.glob("tests/test_compil*.py"))
    return (
        Item("roofline", "what to expect, calculated", roofline),
        Item(
            "compile",
            "every kernel compiles for compute capability 8.0, 8.9 and 9.0, in all its cases",
            (*pytest, "--timeout=3000", *compile_tests),
            modules=("torch", "triton"),
            folder=PLUGIN,
            environment={"FD_GPU_ALL": "1"},
        ),
        Item(
            "hardware",
            "steps, graphs, copies and packed weights on the device give what the processor gives",
            (*pytest, "-m", "hardware"),
            "gpu_cuda",
            folder=PLUGIN,
        ),
        Item(
            "conformance",
            "the kit, in every dtype and format",
            (*fdcore, *FORMS, "--json", str(results / "gpu_conformance.json")),
            "gpu_cuda",
        ),
        Item(
            "first-hour",
            "rates of the device, decodes, prefills, kernels, launches, memory of graphs, compilations",
            (python, "benchmarks/gpu_first_hour.py", "--output", measured),
            "gpu_cuda",
        ),
        Item(
            "compare",
            "measurement against floors",
            (*roofline, "--measured", measured),
            after="first-hour",
        ),
        *(
            Item(
                f"conformance-{framework}",
                f"the kit on {framework}",
                (*fdcore, f"gpu_cuda+{framework}", "--json", str(results / f"gpu_conformance_{framework}.json")),
                f"gpu_cuda+{framework}",
            )
            for framework in ("paddle", "onnx")
        ),
    )


def problem_of(backend: str) -> str:
    """Return why a backend cannot run here on a separate device; "" if it can."""
    offered = installed_plugins().offered(BACKEND)
    if backend not in offered:
        return f"{backend} is not installed"
    probed = offered[backend].probe()
    return "" if probed.available and not probed.emulated else probed.reason


def start(item: Item) -> int:
    """Run an item's command and return its exit status, 124 if it takes too long."""
    # In a new session, so that child processes of the item end with it.
    process = subprocess.Popen(item.command, cwd=item.folder, env=os.environ | item.environment, start_new_session=True)
    try:
        return process.wait(ITEM_TIMEOUT)
    except BaseException as ended:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(ended, subprocess.TimeoutExpired):
            return 124
        raise


def obstacle(item: Item, problem: Callable[[str], str], outcomes: Sequence[Outcome]) -> str:
    """Return why an item is not run; "" if it is."""
    if item.backend and (why := problem(item.backend)):
        return why
    if absent := [name for name in item.modules if find_spec(name) is None]:
        return f"{' and '.join(absent)} not installed"
    if item.after and not any(each.item == item.after and each.result == "passed" for each in outcomes):
        return f"{item.after} did not pass"
    return ""


def run(
    chosen: Sequence[Item], problem: Callable[[str], str] = problem_of, begin: Callable[[Item], int] = start
) -> list[Outcome]:
    """Run items one after another; return their results."""
    outcomes: list[Outcome] = []
    for item in chosen:
        command = shlex.join([Path(item.command[0]).name, *item.command[1:]])
        print(f"\n== {item.name}: {item.shows}", flush=True)
        why = obstacle(item, problem, outcomes)
        if why:
            print(f"   would run: {command}\n   not run: {why}", flush=True)
            outcomes.append(Outcome(item.name, "not run", why))
            continue
        print(f"   {command}", flush=True)
        begun = time.monotonic()
        try:
            status = begin(item)
            failed = "" if status == 0 else f"exit status {status}"
        except OSError as error:
            failed = str(error)
        outcomes.append(Outcome(item.name, "failed" if failed else "passed", failed, time.monotonic() - begun))
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return a table of the results."""
    wide = max(len(each.item) for each in outcomes)
    return "\n".join(f"{each.item:{wide}}  {each.result:8}{each.seconds:8.0f} s  {each.why}" for each in outcomes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [item.name for item in items(RESULTS)]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="ITEM", help=", ".join(names))
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    results = chosen.results.resolve()
    outcomes = run([item for item in items(results) if item.name in chosen.only])
    print(f"\n{summary(outcomes)}")
    ran_on_device = {item.name for item in items(results) if item.backend}
    if any(each.item in ran_on_device and each.result != "not run" for each in outcomes):
        results.mkdir(parents=True, exist_ok=True)
        text = json.dumps([asdict(each) for each in outcomes], indent=1)
        (results / "gpu_session.json").write_text(text + "\n", encoding="utf-8")
    return 1 if any(each.result == "failed" for each in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
