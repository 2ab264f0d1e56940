"""Texts per second of an embedding model in fd_core and in its peers, in turns on the same threads.

    python benchmarks/encoders.py FOLDER
    python benchmarks/encoders.py FOLDER --peer "infinity=VENV/bin/infinity_emb v2 --model-id {model} --port {port} ..."
    python benchmarks/encoders.py FOLDER --library VENV/bin/python

The command of each peer starts a server that has its own environment. With `--library`, `LLM.embed` is compared with
sentence-transformers of that environment, both in one process without HTTP. Prints medians of the rates, of the ratios
of neighbouring runs, and of the processor time spent on a text, which other work on the machine changes less, and the
largest difference of a vector's element.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.start_watch import processor_seconds

from fd_core.cli.bench.compare.processes import Worker, end, end_with_parent
from fd_core.cli.bench.compare.sessions import free_port

Floats = npt.NDArray[np.float32]
Embed = Callable[[list[str], int], tuple[Floats, float]]
"""Returns the vectors of texts, so many of them in a request, and the seconds of processor time."""
_SETS = {"4 to 20 words": (256, 4, 20), "5 to 180 words": (96, 5, 180)}
"""Number of texts, and words of the shortest and of the longest."""
_PER_REQUEST = {"in one request": 2048, "one by one": 1}
_AT_ONCE = 32
_LOAD_SECONDS = 180
_FDCORE = (
    "{python} -m fd_core serve {model} --port {port} --served-model-name model"
    " --backend cpu --dtype float32 --num-threads {threads}"
)


_LIBRARY = """
import json, sys, time
model, threads = sys.argv[1], int(sys.argv[2])
replies, sys.stdout = sys.stdout, sys.stderr
{load}
for line in sys.stdin:
    before = time.process_time()
    vectors = embed(json.loads(line)["texts"])
    spent = time.process_time() - before
    answer = {{"ok": True, "spent": spent, "vectors": [[float(x) for x in row] for row in vectors]}}
    print(json.dumps(answer), file=replies, flush=True)
"""
_LOADS = {
    "fd_core": """
from fd_core import LLM
embed = LLM(model, backend="cpu", dtype="float32", num_threads=threads).embed
""",
    "sentence-transformers": """
import torch
from sentence_transformers import SentenceTransformer
torch.set_num_threads(threads)
embed = SentenceTransformer(model, device="cpu").encode
""",
}


def _texts(count: int, least: int, most: int, words: list[str]) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choice(words) for _ in range(rng.randint(least, most))) for _ in range(count)]


async def _send(url: str, texts: list[str], per_request: int) -> Floats:
    """Return the vectors of texts that `_AT_ONCE` connections send."""
    found: list[Floats] = [np.empty(0, np.float32)] * len(texts)
    begins = iter(range(0, len(texts), per_request))

    async def send(session: aiohttp.ClientSession) -> None:
        for begin in begins:
            body = {"model": "model", "input": texts[begin : begin + per_request], "encoding_format": "base64"}
            async with session.post(f"{url}/v1/embeddings", json=body) as answer:
                answer.raise_for_status()
                for each in (await answer.json())["data"]:
                    found[begin + each["index"]] = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(send(session) for _ in range(_AT_ONCE)))
    return np.array(found)


@contextmanager
def _served(name: str, command: str, model: str, threads: int) -> Iterator[Embed]:
    """Start a server; its output goes to a file."""
    port, python = free_port(), sys.executable
    words = [word.format(model=model, port=port, threads=threads, python=python) for word in command.split()]
    many = {each: str(threads) for each in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    variables = os.environ | many | {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=log, env=variables, start_new_session=True, preexec_fn=end_with_parent
        )
        try:
            for _ in range(_LOAD_SECONDS * 2):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                        break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.5)
            else:
                log.seek(0)
                raise SystemExit(f"{name} did not start within {_LOAD_SECONDS} s:\n{log.read()[-2000:]}")

            def embed(texts: list[str], per_request: int) -> tuple[Floats, float]:
                before = sum(processor_seconds(process.pid))
                vectors = asyncio.run(_send(f"http://127.0.0.1:{port}", texts, per_request))
                return vectors, sum(processor_seconds(process.pid)) - before

            yield embed
        finally:
            end(process)


@contextmanager
def _library(name: str, python: str, model: str, threads: int) -> Iterator[Embed]:
    """Start a process that embeds with a library."""
    code = _LIBRARY.format(load=_LOADS[name])
    variables = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker([python, "-c", code, model, str(threads)], variables, Path(folder) / "log")

        def embed(texts: list[str], per_request: int) -> tuple[Floats, float]:
            answer = worker.ask(texts=texts)
            return np.array(answer["vectors"], np.float32), answer["spent"]

        try:
            yield embed
        finally:
            worker.close()


def _compare(compared: dict[str, Embed], texts: list[str], per_request: int, turns: int) -> None:
    """Measure in turns and print the rates; the first one is the reference."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in compared}
    vectors: dict[str, Floats] = {}
    for turn in range(turns + 1):
        for name, embed in compared.items():
            begun = time.perf_counter()
            vectors[name], processor_s = embed(texts, per_request)
            if turn:
                spent[name].append((time.perf_counter() - begun, processor_s))
    own = next(iter(compared))
    for name, runs in spent.items():
        seconds, processor = (statistics.median(column) / len(texts) for column in zip(*runs, strict=True))
        ratio = statistics.median(theirs[0] / ours[0] for theirs, ours in zip(runs, spent[own], strict=True))
        off = float(np.abs(vectors[name] - vectors[own]).max())
        print(f"  {name}: {1 / seconds:.0f} texts/s, {processor * 1e3:.2f} ms of processor time a text", end="; ")
        print(f"{own} is {ratio:.2f} times as fast, off {off:.1e}", flush=True)


def main() -> None:
    """Measure the model in a folder with `vocab.txt`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--library", metavar="PYTHON", help="environment of sentence-transformers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    known = json.loads((Path(options.folder) / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word for word in known if word.isalpha()]
    commands = [each.partition("=")[::2] for each in (f"fd_core={_FDCORE}", *options.peer)]
    opened = [(name, _served(name, command, options.folder, options.threads)) for name, command in commands]
    ways = _PER_REQUEST
    if options.library is not None:
        pythons = zip(_LOADS, (sys.executable, options.library), strict=True)
        opened = [(name, _library(name, python, options.folder, options.threads)) for name, python in pythons]
        ways = {"in one call": 0}
    with ExitStack() as stack:
        compared = {name: stack.enter_context(each) for name, each in opened}
        for name, sizes in _SETS.items():
            for how, count in ways.items():
                print(f"{name}, {how}")
                _compare(compared, _texts(*sizes, words), count, options.turns)


if __name__ == "__main__":
    main()
