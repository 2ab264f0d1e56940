"""Child process with limits on memory and time that runs hostile inputs one after the other.

    python -m tests.hostile.limits MODULE:FUNCTION < INPUTS

MODULE:FUNCTION takes one input. For each, the child writes a line with the outcome, the duration and the memory held.
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
    """Return the number of rounds: `short` in the default run, `long` in `nox -s hostile`."""
    return long if LONG else short


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of one input."""

    result: Any
    """Return value of the function; None if it raised."""
    error: str
    """Class name of the exception; empty if none."""
    message: str
    seconds: float
    """Processor time, so other load does not count. The limit for all inputs ends a function that waits."""
    held: int
    """Peak growth of the process, in bytes."""


def tried(what: str, inputs: Sequence[Any], *, memory: int = 1 << 30, seconds: float = 120) -> list[Outcome]:
    """Call `MODULE:FUNCTION` with each input; the process gets `memory` bytes in addition to what its imports take.

    Fails if the process ends before all inputs have run.
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
    """Run the inputs from standard input."""
    what, memory = sys.argv[1:]
    module, _, name = what.partition(":")
    function = getattr(importlib.import_module(module), name)
    limit = _status("VmSize") + int(memory)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin.buffer:
        given = msgspec.json.decode(line)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = _status("VmRSS")
        began = time.process_time()
        result, error, message = None, "", ""
        try:
            result = function(given)
        except BaseException as raised:  # noqa: BLE001 - the outcome under test may be any exception
            error, message = type(raised).__name__, str(raised)
        seconds = time.process_time() - began
        outcome = Outcome(result, error, message, seconds, max(0, _status("VmHWM") - before))
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
