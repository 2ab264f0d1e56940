"""Run every check and measurement for an NVIDIA GPU, item by item; a failed item does not stop the others.

    nox -s gpu
    python benchmarks/gpu_session.py [--only hardware llama-8b] [--results FOLDER]

The first installs the dependencies of the second, and runs it; `gpu_offline/` does so on a machine without a network.
Without a GPU it runs the items that need none, lists the skipped commands with the reason, and exits with 0. With one,
it exits with 1 if anything failed. Each item ends within nine minutes on an H100, from empty caches; the compilation
for other devices, the whole kit and other frameworks take longer and come last.
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
NUMERIC = ("gpu_cuda", "gpu_cuda:dtype=float32", "gpu_cuda:quantization=int4")
"""Forms whose quick kit is an item each."""
FORMS = (
    *NUMERIC,
    "gpu_cuda:dtype=float16",
    "gpu_cuda:quantization=int8",
    "gpu_cuda:kv_cache_dtype=int8",
    "gpu_cuda:kv_cache_dtype=fp8",
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
    python, workers = sys.executable, str(max(1, min(12, (os.cpu_count() or 1) - 2)))
    first_hour = (python, "benchmarks/gpu_first_hour.py")
    fdcore = (python, "-m", "fd_core.cli")
    roofline = (python, "benchmarks/gpu_roofline.py", "--results", str(results))
    pytest = (python, "-m", "pytest", "-q")
    compile_tests = sorted(str(path.relative_to(PLUGIN)) for path in PLUGIN.glob("tests/test_compil*.py"))

    def saved(name: str) -> str:
        return str(results / f"gpu_{name}.json")

    return (
        Item("roofline", "what to expect, calculated", roofline),
        Item(
            "environment",
            "one kernel computes, and at which bandwidth",
            (*fdcore, "doctor", "gpu_cuda", "--only", "rms_norm", "--json", saved("doctor")),
            "gpu_cuda",
        ),
        Item(
            "hardware",
            "steps, graphs, copies and packed weights on the device give what the processor gives",
            (*pytest, "-m", "hardware", "-n", workers, "--ignore", "tests/test_families.py"),
            "gpu_cuda",
            folder=PLUGIN,
        ),
        Item(
            "families",
            "each architecture, also those composed of torch operations, computes what numpy computes",
            (*pytest, "-m", "hardware", "-n", workers, "tests/test_families.py"),
            "gpu_cuda",
            folder=PLUGIN,
        ),
        Item(
            "kernels",
            "attention and packed products next to floors and libraries",
            (python, "benchmarks/gpu_kernels.py", "--output", saved("kernels")),
            "gpu_cuda",
        ),
        *(
            Item(
                f"llama-8b-{form}{'-8k' * (context > 1024)}",
                f"decodes of 1, 32 and 256 requests of {context:,} tokens, prefills, kernels, memory",
                (
                    *(*first_hour, "--models", "llama-8b", "--formats", form, "--context", str(context)),
                    *("--prefill", str(max(context, 2048)), "--output", saved(f"llama_8b_{form}_{context}")),
                ),
                "gpu_cuda",
            )
            for form, context in (("bf16", 1024), ("bf16", 8192), ("int4", 1024), ("fp8", 1024))
        ),
        Item(
            "http",
            "a model of 7 billion parameters over HTTP, 1, 32 and 256 requests at once",
            (python, "benchmarks/gpu_http.py", "--output", saved("http")),
            "gpu_cuda",
        ),
        *(
            Item(
                f"kit-{form.partition('=')[2] or 'bfloat16'}",
                "the kit without production sizes",
                (
                    *fdcore,
                    "conformance",
                    form,
                    "--quick",
                    "-n",
                    workers,
                    "--json",
                    saved(f"kit_{form.rpartition('=')[2]}"),
                ),
                "gpu_cuda",
            )
            for form in NUMERIC
        ),
        Item(
            "first-hour",
            "the same of four models",
            (*first_hour, "--output", saved("first_hour")),
            "gpu_cuda",
        ),
        Item(
            "compare",
            "measurement against floors",
            (*roofline, "--measured", saved("first_hour")),
            after="first-hour",
        ),
        Item(
            "compile",
            "every kernel compiles for compute capability 8.0, 8.9 and 9.0, in all its cases",
            (*pytest, "--timeout=3000", *compile_tests),
            modules=("torch", "triton"),
            folder=PLUGIN,
            environment={"FD_GPU_ALL": "1"},
        ),
        Item(
            "conformance",
            "the kit, in every dtype and format",
            (*fdcore, "conformance", *FORMS, "--json", saved("conformance")),
            "gpu_cuda",
        ),
        *(
            Item(
                f"conformance-{framework}",
                f"the kit on {framework}",
                (*fdcore, "conformance", f"gpu_cuda+{framework}", "--json", saved(f"conformance_{framework}")),
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
