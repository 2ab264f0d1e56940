"""A child process with limits on memory and time, in which hostile inputs are tried one after the other.

    python -m tests.hostile.limits MODULE:FUNCTION < INPUTS

MODULE:FUNCTION takes one input. The child writes a line for each: how it ended, how long it took, how much it held.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["LONG", "Outcome", "at_length", "tried"]

LONG = os.environ.get("FD_HOSTILE") == "1"
MEGABYTE = 1 << 20
_STATUS = Path("/proc/self/status")


def at_length(short: int, long: int) -> int:
    """The number of rounds: `short` in the default run, `long` in `nox -s hostile`."""
    return long if LONG else short


class Outcome(msgspec.Struct, frozen=True):
    """How one input ended."""

    result: Any
    """What the function returned; None if it raised."""
    error: str
    """Name of the class of what it raised, or empty."""
    message: str
    seconds: float
    """Of processors: other work on the machine takes no part. What waits is ended by the limit of all inputs."""
    held: int
    """Bytes by which the process grew meanwhile, at most."""


def tried(what: str, inputs: Sequence[Any], *, memory: int = 1 << 30, seconds: float = 120) -> list[Outcome]:
    """Try the inputs with the function `MODULE:FUNCTION`; the process gets `memory` bytes beyond what its imports take.

    Fails if the process ends before all were tried.
    """
    ended = subprocess.run(
        [sys.executable, "-m", "tests.hostile.limits", what, str(memory)],
        input=b"\n".join(map(msgspec.json.encode, inputs)),
        capture_output=True,
        timeout=seconds,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    outcomes = [msgspec.json.decode(line, type=Outcome) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0 and len(outcomes) == len(inputs), (
        f"input {len(outcomes)} ended the process with {ended.returncode}: {ended.stderr.decode()[-2000:]}"
    )
    return outcomes


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Try what stands in the standard input."""
    what, memory = sys.argv[1:]
    module, _, name = what.partition(":")
    function = getattr(importlib.import_module(module), name)
    limit = _status("VmSize") + int(memory)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin.buffer:
        given = msgspec.json.decode(line)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = _status("VmRSS")
        began = time.process_time()
        result, error, message = None, "", ""
        try:
            result = function(given)
        except BaseException as raised:  # noqa: BLE001 - whatever it is, it is what the test is about
            error, message = type(raised).__name__, str(raised)
        seconds = time.process_time() - began
        outcome = Outcome(result, error, message, seconds, max(0, _status("VmHWM") - before))
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
