"""Compare KV stores with the plainest way to the same place: plain files for disk, redis-py for Redis.

    python benchmarks/stores.py disk:FOLDER redis://127.0.0.1:6379/0

Values have the size of a block's KV and are new in every round. The contenders take turns and the order rotates: bare,
the store alone, and the store with sealing and opening, which is what the engine does. Shares are taken inside rounds,
since machines drift. Each value is held until its batch is over, as in the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.bare_stores import Bare, bare_for
from harness.options import RESULTS
from rich.console import Console
from rich.table import Table

import fd_core
from fd_core.cli.bench.compare import machine
from fd_core.errors import FdError
from fd_core.kv.stores.contract import KVStore
from fd_core.kv.stores.envelope import HEADER_BYTES, Envelope
from fd_core.kv.stores.location import StoreLocation, parse_location
from fd_core.plugins import STORE, installed_plugins

TIMEOUT = 60.0
BARE, ALONE, SEALED = "bare", "store", "store, sealed"
HEADINGS = ("store", "operation", "contender", "MB/s", "us a value", "share of bare")


@dataclass(slots=True)
class Contest:
    """One store against its bare counterpart: seconds of each round, by operation and contender."""

    location: StoreLocation
    against: str
    value_bytes: int
    batch: int
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def share(self, operation: str, contender: str) -> float | None:
        """Return the contender's speed as a share of the bare one's: inside each round, then the median round."""
        bare = self.seconds.get((operation, BARE))
        if bare is None or contender == BARE:
            return None
        return median(theirs / ours for theirs, ours in zip(bare, self.seconds[operation, contender], strict=True))

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table's rows, as HEADINGS names them."""
        rows = []
        for (operation, contender), seconds in self.seconds.items():
            each = median(seconds) / self.batch
            share = self.share(operation, contender)
            named = self.against if contender == BARE else contender
            speed = f"{self.value_bytes / each / 1e6:,.0f}"
            rows.append(
                (
                    self.location.scheme,
                    operation,
                    named,
                    speed,
                    f"{each * 1e6:,.0f}",
                    "" if share is None else f"{share:.2f}",
                )
            )
        return rows

    def values(self) -> dict[str, Any]:
        """Return everything as plain values, every round included."""
        return {
            "store": self.location.scheme,
            "against": self.against,
            "shares": {
                f"{operation}, {contender}": self.share(operation, contender) for operation, contender in self.seconds
            },
            "rounds_us": {
                f"{operation}, {contender}": [round(second * 1e6, 1) for second in seconds]
                for (operation, contender), seconds in self.seconds.items()
            },
        }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `size` is returned in bytes."""
    parser = argparse.ArgumentParser(
        prog="stores.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("locations", nargs="+", metavar="LOCATION", help="as after --kv-store; its values are deleted")
    parser.add_argument("--size", type=int, default=720, help="KiB of a payload (default: 720)")
    parser.add_argument("--batch", type=int, default=16, help="values in a call (default: 16)")
    parser.add_argument("--rounds", type=int, default=20, help="turns that each contender takes (default: 20)")
    parser.add_argument("--compression", choices=("none", "zlib"), default="none", help="of the envelope")
    parser.add_argument("--out", default="stores", help="name or path of the result, without suffix")
    options = parser.parse_args(arguments)
    for flag in ("size", "batch", "rounds"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag} must be at least 1")
    options.size *= 1024
    return options


def compete(location: StoreLocation, options: argparse.Namespace) -> Contest:
    """Measure one store. Raises `FdError` if it cannot be used."""
    store = installed_plugins().load(STORE, location.scheme)(location)
    store.open(TIMEOUT)
    bare = bare_for(location)
    _settle_in(store)
    contest = Contest(location, bare.what if bare else "", options.size + HEADER_BYTES, options.batch)
    envelope = Envelope(os.urandom(32), options.compression)
    try:
        for number in range(options.rounds + 1):
            payloads = [os.urandom(options.size) for _ in range(options.batch)]
            turns = _turns(store, bare, envelope, payloads)
            for turn in range(len(turns)):
                contender, operations = turns[(turn + number) % len(turns)]
                for operation, call in operations.items():
                    start = time.perf_counter()
                    answer = call()
                    seconds = time.perf_counter() - start
                    del answer
                    if number and operation != "delete":  # the first round only warms up
                        contest.seconds.setdefault((operation, contender), []).append(seconds)
    finally:
        store.close()
    contest.seconds = dict(sorted(contest.seconds.items(), key=lambda item: (item[0][0] != "write", item[0][1])))
    return contest


def _settle_in(store: KVStore) -> None:
    """Let the store create its sub-folders, buffers and connections."""
    keys = [bytes([number]) * 16 for number in range(256)]
    store.put([(key, (key,)) for key in keys], TIMEOUT)
    store.delete(keys, TIMEOUT)


Turn = tuple[str, dict[str, Callable[[], object]]]


def _turns(store: KVStore, bare: Bare | None, envelope: Envelope, payloads: Sequence[bytes]) -> list[Turn]:
    """Return each contender with its operation, in order; every value is new."""
    limit = len(payloads[0]) + HEADER_BYTES
    turns: list[Turn] = []
    if bare is not None:
        names = [os.urandom(16).hex() for _ in payloads]
        values = [bytes(HEADER_BYTES) + payload for payload in payloads]
        turns.append(
            (
                BARE,
                {
                    "write": lambda: bare.write(names, values),
                    "read": lambda: _all(bare.read(names)),
                    "delete": lambda: bare.delete(names),
                },
            )
        )
    plain = [(os.urandom(16), (bytes(HEADER_BYTES), payload)) for payload in payloads]
    turns.append(
        (
            ALONE,
            {
                "write": lambda: _all([None] * (len(plain) - store.put(plain, TIMEOUT)), missing=0),
                "read": lambda: _all(store.get([key for key, _ in plain], limit, TIMEOUT)),
                "delete": lambda: store.delete([key for key, _ in plain], TIMEOUT),
            },
        )
    )
    keys = [os.urandom(16) for _ in payloads]

    def write() -> None:
        sealed = [(key, envelope.seal(key, payload)) for key, payload in zip(keys, payloads, strict=True)]
        _all([None] * (len(keys) - store.put(sealed, TIMEOUT)), missing=0)

    def read() -> list[memoryview]:
        found = _all(store.get(keys, limit, TIMEOUT))
        return [envelope.open(key, value, len(payloads[0])) for key, value in zip(keys, found, strict=True)]

    turns.append((SEALED, {"write": write, "read": read, "delete": lambda: store.delete(keys, TIMEOUT)}))
    return turns


def _all(values: Sequence[Any], missing: int | None = None) -> Sequence[Any]:
    """Return the values; a store that lost some was not measured."""
    if len(values) if missing == 0 else any(value is None for value in values):
        raise FdError("the store lost values; increase its capacity")
    return values


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; return 1 where a store cannot be used."""
    options = parse(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    load = machine.load_average()
    if load > 0.5:
        console.print(f"[yellow]other work is running (load average {load:.1f}): the figures will be noisy[/]")
    contests = []
    try:
        for text in options.locations:
            location = parse_location(text)
            with console.status(f"measuring {location.shown}"):
                contests.append(compete(location, options))
    except FdError as error:
        console.print(str(error), highlight=False, markup=False)
        return 1
    command = ["python", "benchmarks/stores.py", *(f"{contest.location.scheme}:..." for contest in contests)]
    facts = {
        "command": shlex.join(command),
        "machine": machine.describe(),
        "load_average_before": load,
        "fd_core": fd_core.__version__,
        **{name: getattr(options, name) for name in ("size", "batch", "rounds", "compression")},
    }
    show(contests, console)
    for path in write(contests, facts, RESULTS / options.out):
        console.print(f"wrote {path}", highlight=False)
    return 0


def show(contests: Sequence[Contest], console: Console) -> None:
    """Print the table."""
    table = Table()
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in HEADINGS[:3] else "right")
    for contest in contests:
        for row in contest.rows():
            table.add_row(*row)
        table.add_section()
    console.print(table)


def write(contests: Sequence[Contest], facts: Mapping[str, Any], out: Path) -> tuple[Path, Path]:
    """Write OUT.json (every round) and OUT.md (the table and its command); return both paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = out.with_suffix(".json"), out.with_suffix(".md")
    as_json.write_text(json.dumps({**facts, "stores": [contest.values() for contest in contests]}) + "\n")
    table = [HEADINGS, ["---"] * len(HEADINGS), *(row for contest in contests for row in contest.rows())]
    lines = [
        f"# {out.name}",
        "",
        f"    {facts['command']}",
        "",
        f"{facts['machine']['cpu']}; load average before: {facts['load_average_before']:.1f}.",
        "",
        *("| " + " | ".join(cells) + " |" for cells in table),
        "",
        f"Medians of {facts['rounds']} rounds in which the contenders take turns, {facts['batch']} values of "
        f"{facts['size'] // 1024} KiB and their header in a call, compression {facts['compression']}. Sealed: with "
        "the keyed digest over every byte, made when writing and checked when reading. Share of bare: speeds of the "
        f"same round, in the median round. fd_core {facts['fd_core']}.",
        "",
    ]
    as_markdown.write_text("\n".join(lines))
    return as_json, as_markdown


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
