"""Measure the processor time of a streamed token in the server and in each thread of its engine.

    python benchmarks/stream_cost.py [--streams 1,8,32,200] [--rounds 9]
    python benchmarks/stream_cost.py --before ../before/.venv/bin/fdcore   # two commits, which take turns
    python benchmarks/stream_cost.py --model smollm2 --streams 1,8         # steps that empty the caches

By default a scripted model is served, whose steps sleep, so that every token is an event and time is spent outside of
the model only: the main thread of its engine plans, encodes and sends, others compute (`device`). Times are those of
the kernel for each thread, from the tenth event of the last stream until the first stream has had nine tenths of its
tokens. `gap` is the longest pause between two events of one stream, in steps. `--core N` binds server and engine to
one core. All servers run from the beginning and take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.machine import describe, load_average
from harness.processes import EngineFailedError, end, end_with_parent, interrupted_by_sigterm
from harness.sessions import free_port
from harness.start_watch import children
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
PLUGIN = """
import time
from fd_core.backends.null import NullBackend, NullModel
from fd_core.hookspecs import Entry, hookimpl
FD_CONTRACT = 1

class PacedModel(NullModel):
    def head(self, states):
        time.sleep(max(%(step)g, %(row)g * len(states)))
        logits = super().head(states)
        logits[:, 94:] -= 100.0  # the other tokens are printable characters
        return logits

class PacedBackend(NullBackend):
    name = "paced"
    def load_model(self, path, ops, progress):
        progress(1, 1)
        return PacedModel()

@hookimpl
def fd_register_backends():
    return [Entry("paced", "fd_paced:PacedBackend", "scripted tokens at a pace")]
"""
EDGE = 10
"""Events of each stream before the measurement."""
READY_SECONDS = 240


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="stream_cost.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(sys.executable).with_name("fdcore")
    parser.add_argument("--fdcore", type=Path, default=here, help="the program (default: in this Python's folder)")
    parser.add_argument("--before", type=Path, help="program `fdcore` of another commit, which takes turns")
    parser.add_argument("--streams", type=lambda text: [*map(int, text.split(","))], default=[1, 8, 32, 200])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--events", type=int, default=400, help="events of a measurement (default: 400)")
    parser.add_argument("--model", help="serve this model instead of the scripted one")
    parser.add_argument("--step", type=float, default=0.005, help="seconds of a step at least (default: 0.005)")
    parser.add_argument("--row", type=float, default=0.0004, help="seconds of a step for each text (default: 0.0004)")
    parser.add_argument("--core", type=int, help="core for server and engine (default: any)")
    parser.add_argument("--out", default="stream_cost", help="name of the file in results/ (default: stream_cost)")
    return parser.parse_args(arguments)


@contextmanager
def served(program: Path, options: argparse.Namespace) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a server, and return it with its port. Raises `EngineFailedError`."""
    port = free_port()
    with tempfile.TemporaryDirectory() as place:
        site = Path(place)
        (site / "fd_paced.py").write_text(PLUGIN % {"step": options.step, "row": options.row})
        info = site / "fd_paced-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fd-paced\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[fd_core]\npaced = fd_paced\n")
        model = [options.model] if options.model else ["null", "--backend", "paced", "--kv-cache-memory", "16M"]
        command = [str(program), "serve", *model, "--port", str(port), "--max-num-seqs", str(max(options.streams))]
        paths = [place, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        with (site / "log").open("wb") as log:
            process = subprocess.Popen(
                command if options.core is None else ["taskset", "-c", str(options.core), *command],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not _ready(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise EngineFailedError(f"the server is not ready:\n{(site / 'log').read_text()[-2000:]}")
                time.sleep(0.1)
            yield process, port
        finally:
            end(process)


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def thread_seconds(process: subprocess.Popen[bytes]) -> Counter[str]:
    """Return the processor seconds of the server, of its engine's main thread, and of the engine's other threads."""
    found: Counter[str] = Counter()
    for pid in [process.pid, *children(process.pid)]:
        folder = Path(f"/proc/{pid}")
        engine = b"fd_core.engine.process.child" in (folder / "cmdline").read_bytes()
        if engine or pid == process.pid:
            for task in (folder / "task").iterdir():
                name = "server" if not engine else "engine" if int(task.name) == pid else "device"
                found[name] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


class TimedStream(asyncio.Protocol):
    """Counts the events of one stream."""

    def __init__(self, body: bytes, changed: asyncio.Event) -> None:
        self._body = body
        self._changed = changed
        self.events = 0
        self.ended = False
        self.last = 0.0
        self.gap = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        assert isinstance(transport, asyncio.Transport)
        transport.write(head + b"content-length: %d\r\n\r\n" % len(self._body) + self._body)

    def data_received(self, data: bytes) -> None:
        """Count."""
        now, count = time.perf_counter(), data.count(b"data: {")
        if count:
            if self.events >= EDGE:
                self.gap = max(self.gap, now - self.last)
            self.events, self.last = self.events + count, now
        self.ended |= b"data: [DONE]" in data
        self._changed.set()


async def measured(process: subprocess.Popen[bytes], port: int, streams: int, events: int) -> Any:
    """Return microseconds of an event by thread, and facts about the events."""
    count = 2 * EDGE + max(events // streams, 5)
    changed = asyncio.Event()
    body = {
        "prompt": [*range(1, 17)],
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    loop = asyncio.get_running_loop()
    readers: list[TimedStream] = []
    transports = []
    for number in range(streams):
        text = json.dumps(body | {"prompt": [number % 128, *body["prompt"]]}).encode()
        transport, reader = await loop.create_connection(
            lambda text=text: TimedStream(text, changed), "127.0.0.1", port
        )
        readers.append(reader)
        transports.append(transport)

    async def until(least: int, of: Any) -> tuple[float, int, Counter[str]]:
        while of(reader.events for reader in readers) < least and not any(reader.ended for reader in readers):
            if any(each.is_closing() for each in transports):
                raise EngineFailedError("the server closed a stream")
            changed.clear()
            await changed.wait()
        return time.perf_counter(), sum(reader.events for reader in readers), thread_seconds(process)

    begun, before, spent = await until(EDGE, min)
    ended, after, now = await until(count * 9 // 10, max)  # some tokens have no text
    while not all(reader.ended for reader in readers):
        changed.clear()
        await changed.wait()
    for transport in transports:
        transport.close()
    events = after - before
    if not events:
        raise EngineFailedError(f"a stream ended before another had {EDGE} events: make steps longer")
    now.subtract(spent)
    steps = events / streams
    return {
        "us": {name: seconds / events * 1e6 for name, seconds in now.items() if seconds > 0},
        "events_of_tokens": sum(reader.events for reader in readers) / (count * streams),
        "rate": events / (ended - begun),
        "gap": max(reader.gap for reader in readers) / ((ended - begun) / steps),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure in turns, print and write."""
    options = parse(arguments)
    interrupted_by_sigterm()
    programs = {"now": options.fdcore} | ({"before": options.before} if options.before else {})
    found: dict[tuple[int, str], list[Any]] = defaultdict(list)
    loads = [load_average()]
    try:
        with ExitStack() as servers:
            running = {name: servers.enter_context(served(path, options)) for name, path in programs.items()}
            for server in running.values():
                asyncio.run(measured(*server, 1, 100))  # the first requests load modules
            for number in range(options.rounds):
                for streams in options.streams:
                    for name in list(running)[:: 1 if number % 2 else -1]:
                        found[streams, name].append(asyncio.run(measured(*running[name], streams, options.events)))
                loads.append(load_average())
    except EngineFailedError as error:
        print(error, file=sys.stderr)
        return 1
    rows = []
    for (streams, name), results in sorted(found.items()):
        parts = sorted({part for result in results for part in result["us"]}, reverse=True)
        us = {part: round(median(result["us"].get(part, 0.0) for result in results), 1) for part in parts}
        facts = {
            key: round(median(result[key] for result in results), 3) for key in ("events_of_tokens", "rate", "gap")
        }
        rows.append({"streams": streams, "commit": name, "us": us, **facts})
    show(rows)
    command = shlex.join(["python", "benchmarks/stream_cost.py", *(sys.argv[1:] if arguments is None else arguments)])
    facts = {"command": command, "machine": describe(), "load_average": loads, "rows": rows}
    (RESULTS / f"{options.out}.json").write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def show(rows: list[Any]) -> None:
    """Print a table."""
    parts = sorted({part for row in rows for part in row["us"]}, reverse=True)
    table = Table(title="processor microseconds of an event")
    for heading in ("streams", "commit", *parts, "events / token", "events / s", "gap, steps"):
        table.add_column(heading, justify="right")
    for row in rows:
        facts = f"{row['events_of_tokens']:.2f}", f"{row['rate']:,.0f}", f"{row['gap']:.1f}"
        table.add_row(str(row["streams"]), row["commit"], *(f"{row['us'].get(part, 0):.1f}" for part in parts), *facts)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
