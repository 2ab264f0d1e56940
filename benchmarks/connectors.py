"""Compare connectors: the KV of blocks from one process to another, as from a prefill worker to a decode worker.

    python benchmarks/connectors.py tcp shared_memory kv_store --kv-store disk:FOLDER

Two processes, a ZeroMQ connection over loopback for messages and the payloads that follow them, a window of pieces in
flight. The prefill side puts values from its memory; the decode side takes each, copies it to another buffer, as it
would to a device, and returns the credit. Connectors take turns within a round and the order rotates.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import msgspec
import numpy as np
import zmq
from harness.options import RESULTS
from rich.console import Console
from rich.table import Table

import fd_core
from fd_core.cli.bench.compare import machine
from fd_core.disagg.connectors.contract import Connector, ConnectorSettings
from fd_core.kv.stores.location import parse_location
from fd_core.plugins import CONNECTOR, STORE, installed_plugins

HEADINGS = ("connector", "GB/s", "us a value", "decode side CPU us", "prefill side CPU us", "opening us")
TIMEOUT = 30.0


class Order(msgspec.Struct):
    """Request of the decode side: `values` pieces through one lease."""

    connector: str
    lease: str
    address: bytes
    values: int
    window: int
    size: int


class Figures(msgspec.Struct):
    """One turn of one connector."""

    seconds: float
    """From the order to the last value copied."""
    opening: float
    """To open the decode side's end."""
    decode_cpu: float
    prefill_cpu: float


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `size` is returned in bytes."""
    parser = argparse.ArgumentParser(
        prog="connectors.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("connectors", nargs="+", metavar="NAME", help="as after --kv-connector")
    parser.add_argument("--kv-store", help="for connectors that go through one")
    parser.add_argument("--size", type=int, default=720, help="KiB of a block's KV (default: 720)")
    parser.add_argument("--values", type=int, default=250, help="pieces of a lease (default: 250, 8,000 tokens)")
    parser.add_argument("--window", type=int, default=8, help="pieces on their way (default: 8)")
    parser.add_argument("--rounds", type=int, default=15, help="turns that each connector takes (default: 15)")
    parser.add_argument("--out", default="connectors", help="name or path of the result, without suffix")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.size = options.size * 1024 + 80
    return options


def make(name: str, kv_store: str | None) -> Connector:
    """Return a connector, created as in an engine."""
    plugins, store = installed_plugins(), None
    if kv_store is not None:
        location = parse_location(kv_store)
        store = partial(plugins.load(STORE, location.scheme), location)
    return plugins.load(CONNECTOR, name)(ConnectorSettings(store, TIMEOUT))


def serve(options: argparse.Namespace) -> None:
    """Run the prefill side until the decode side ends it."""
    connectors = {name: make(name, options.kv_store) for name in options.connectors}
    values = [np.full(options.size - 80, number, np.uint8).data for number in range(2 * options.window)]
    header = bytes(80)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(options.serve)
        socket.send(b"")
        while order := socket.recv():
            wanted = msgspec.msgpack.decode(order, type=Order)
            started = time.process_time()
            limits = {"window": wanted.window, "value_bytes": wanted.size}
            outbox = connectors[wanted.connector].open_outbox(wanted.lease, wanted.address, **limits)
            taken = 0
            for index in range(wanted.values):
                while index - taken >= wanted.window:
                    taken = int.from_bytes(socket.recv(), "little")
                reference, frames = outbox.put(index, (header, values[index % len(values)]))
                message = msgspec.msgpack.encode((index, reference))
                socket.send_multipart([message, *frames], copy=False)
            while taken < wanted.values:
                taken = int.from_bytes(socket.recv(), "little")
            outbox.close()
            socket.send(msgspec.msgpack.encode(time.process_time() - started))
        for connector in connectors.values():
            connector.close()


def turn(socket: zmq.Socket[bytes], peer: bytes, name: str, connector: Connector, options: Any) -> Figures:
    """Carry one lease; the figures of the decode side, and the other's processor time."""
    lease = secrets.token_hex(16)
    device = np.zeros((2 * options.window, options.size), np.uint8)
    cpu, start = time.process_time(), time.perf_counter()
    pieces = range(options.values)
    inbox = connector.open_inbox(lease, pieces=pieces, window=options.window, value_bytes=options.size)
    opening = time.perf_counter() - start
    order = Order(name, lease, inbox.address, options.values, options.window, options.size)
    socket.send_multipart([peer, msgspec.msgpack.encode(order)])
    for taken in pieces:
        _, message, *frames = socket.recv_multipart(copy=False)
        index, reference = msgspec.msgpack.decode(message.buffer)
        value = inbox.take(index, reference, [frame.buffer for frame in frames])
        np.copyto(device[index % len(device)], np.frombuffer(value, np.uint8))
        inbox.done(index, reference)
        socket.send_multipart([peer, (taken + 1).to_bytes(4, "little")])
    seconds = time.perf_counter() - start
    assert device[index % len(device), -1] == index % (2 * options.window), "another value arrived"
    del value
    inbox.close()
    cpu = time.process_time() - cpu
    _, far = socket.recv_multipart()
    return Figures(seconds, opening, cpu, msgspec.msgpack.decode(far, type=float))


def compete(options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Measure the connectors in turns; the first round only warms up."""
    connectors = {name: make(name, options.kv_store) for name in options.connectors}
    figures: dict[str, list[Figures]] = {name: [] for name in connectors}
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        words = [*options.connectors, "--size", str(options.size // 1024), "--window", str(options.window)]
        words += ["--kv-store", options.kv_store] if options.kv_store else []
        command = [sys.executable, __file__, *words, "--serve", f"tcp://127.0.0.1:{port}"]
        with subprocess.Popen(command) as far:
            try:
                peer, _ = socket.recv_multipart()
                for number in range(options.rounds + 1):
                    names = list(connectors)
                    for position in range(len(names)):
                        name = names[(position + number) % len(names)]
                        measured = turn(socket, peer, name, connectors[name], options)
                        if number:
                            figures[name].append(measured)
                socket.send_multipart([peer, b""])
                far.wait()
            finally:
                far.kill()
    for connector in connectors.values():
        connector.close()
    return figures


def rows(figures: dict[str, list[Figures]], options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return the cells of the table's rows, as HEADINGS names them."""
    table = []
    for name, turns in figures.items():
        each = median(turn.seconds for turn in turns) / options.values
        decode, prefill = (
            median(getattr(turn, side) for turn in turns) / options.values for side in ("decode_cpu", "prefill_cpu")
        )
        opening = median(turn.opening for turn in turns)
        cells = (options.size / each / 1e9, each * 1e6, decode * 1e6, prefill * 1e6, opening * 1e6)
        table.append((name, f"{cells[0]:.2f}", *(f"{cell:,.0f}" for cell in cells[1:])))
    return table


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison."""
    options = parse(arguments)
    if options.serve:
        serve(options)
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=160)
    load = machine.load_average()
    if load > 0.5:
        console.print(f"[yellow]other work is running (load average {load:.1f}): the figures will be noisy[/]")
    figures = compete(options)
    cells = rows(figures, options)
    table = Table(*HEADINGS)
    for row in cells:
        table.add_row(*row)
    console.print(table)
    store = f" --kv-store {parse_location(options.kv_store).scheme}:..." if options.kv_store else ""
    facts = {
        "command": f"python benchmarks/connectors.py {shlex.join(options.connectors)}{store}",
        "machine": machine.describe(),
        "load_average_before": load,
        "fd_core": fd_core.__version__,
        **{name: getattr(options, name) for name in ("size", "values", "window", "rounds")},
    }
    out = RESULTS / options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    rounds = {name: [msgspec.to_builtins(turn) for turn in turns] for name, turns in figures.items()}
    out.with_suffix(".json").write_text(json.dumps({**facts, "rounds": rounds}) + "\n")
    lines = [
        f"# {out.name}",
        "",
        f"    {facts['command']}",
        "",
        f"{machine.describe()['cpu']}; load average before: {load:.1f}.",
        "",
        *("| " + " | ".join(row) + " |" for row in (HEADINGS, ["---"] * len(HEADINGS), *cells)),
        "",
        f"Medians of {options.rounds} rounds in which the connectors take turns: {options.values} values of "
        f"{options.size:,} bytes through a lease with a window of {options.window}, from the order to the last value "
        f"copied, opening included. fd_core {fd_core.__version__}.",
        "",
    ]
    out.with_suffix(".md").write_text("\n".join(lines))
    console.print(f"wrote {out.with_suffix('.json')} and .md", highlight=False)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
