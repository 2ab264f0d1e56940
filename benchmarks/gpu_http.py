"""Serve a model on a GPU over HTTP, and measure it with `fdcore bench serve` at several numbers of concurrent requests.

    python benchmarks/gpu_http.py [MODEL] [--backend gpu_cuda] [--concurrency 1 32 256] [--output FILE]

MODEL is a folder, a GGUF file or a packaged name; by default `random_gguf.py 7b bf16` is written to memory (15 GB) and
deleted afterwards, which needs SmolLM2's file for its tokenizer. Writes the start's output, the seconds until ready,
and the result of each run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fd_core.cli.bench.compare import machine
from fd_core.cli.bench.compare.processes import EngineFailedError, end, end_with_parent, interrupted_by_sigterm
from fd_core.cli.bench.compare.sessions import free_port

RESULT = Path(__file__).resolve().parent / "results" / "gpu_http.json"
FDCORE = (sys.executable, "-m", "fd_core")
START_SECONDS = 240


@contextmanager
def random_model() -> Iterator[Path]:
    """Return a file with random weights in the shape of a model of 7 billion parameters, in memory if possible."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        script = Path(__file__).with_name("random_gguf.py")
        command = [sys.executable, str(script), "7b", "bf16", "-o", str(folder / "7b.gguf")]
        subprocess.run(command, check=True, env=os.environ | {"TMPDIR": str(folder)})
        yield folder / "7b.gguf"
    finally:
        shutil.rmtree(folder)


@contextmanager
def served(model: str, backend: str, log: Path, flags: list[str]) -> Iterator[tuple[str, float]]:
    """Start a server; return its URL and the seconds until it was ready. Raises `EngineFailedError`."""
    port, begun = free_port(), time.monotonic()
    command = [*FDCORE, "serve", model, "--backend", backend, "--port", str(port), *flags]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, preexec_fn=end_with_parent
        )
    try:
        while not _ready(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > begun + START_SECONDS:
                raise EngineFailedError(f"the server is not ready:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", time.monotonic() - begun
    finally:
        end(process)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def measured(url: str, concurrency: int, input_len: int, output_len: int, file: Path) -> dict[str, Any]:
    """Return the result of `fdcore bench serve`, two requests for each concurrent one."""
    sizes = ["--num-prompts", str(2 * concurrency), "--max-concurrency", str(concurrency)]
    lengths = ["--input-len", str(input_len), "--output-len", str(output_len)]
    subprocess.run([*FDCORE, "bench", "serve", "--url", url, *sizes, *lengths, "--json", str(file)], check=True)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model to serve")
    parser.add_argument("--backend", default="gpu_cuda")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--output", type=Path, default=RESULT)
    chosen = parser.parse_args(arguments)
    interrupted_by_sigterm()
    found: dict[str, Any] = {"machine": machine.describe(), "model": chosen.model or "7b bf16, random", "runs": []}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        log, file = Path(place) / "serve.log", Path(place) / "bench.json"
        with (
            random_model() if chosen.model is None else nullcontext(chosen.model) as model,
            served(str(model), chosen.backend, log, []) as (url, seconds),
        ):
            found |= {"ready_s": seconds, "start": log.read_text(encoding="utf-8").splitlines()}
            print("\n".join(found["start"]), flush=True)
            for concurrency in chosen.concurrency:
                found["runs"].append(measured(url, concurrency, chosen.input_len, chosen.output_len, file))
                chosen.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
