"""Paths of a request through the code, traced: every function of `fd_core` that a scenario enters.

`python -m tests.walks` prints the cost of each walk and its trace, `--write` puts the walks into the tour.
`tests/test_walks.py` keeps them within budgets and the tour up to date.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Final, NamedTuple

import msgspec

from fd_core.engine.core import Engine
from fd_core.types import StepOutput

ROOT: Final = Path(__file__).parents[1] / "fd_core"
_PARTS: Final = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<module>")
"""Code objects that are not functions."""
_TRIES: Final = 5
"""Number of traces, of which the shortest counts: the number of turns of the event loop depends on timing, and the
engine publishes its statistics periodically."""
_PAUSE: Final = 0.05
"""Seconds for what follows an answer; less than from one statistic to the next."""

_WAITS: Final = ("WaitingQueue.push", "WaitingQueue.park")
"""A request waits again, ready or for the end of the save of its KV."""


class Call(NamedTuple):
    """One entry of a function."""

    thread: str
    file: str
    """Path below `fd_core`."""
    function: str
    """Qualified name."""


class Walk(msgspec.Struct, frozen=True):
    """Functions that a scenario entered, in order, in the shortest of several tries."""

    calls: tuple[Call, ...]
    passing: tuple[tuple[str, str], ...] = ()
    """Files and functions that not every try entered."""

    @property
    def functions(self) -> set[tuple[str, str]]:
        """Distinct functions, each with its file."""
        return {call[1:] for call in self.calls}

    @property
    def files(self) -> set[str]:
        """Distinct files."""
        return {call.file for call in self.calls}

    def cost(self) -> str:
        """Return the figures that budgets bound."""
        return f"{len(self.calls)} calls, {len(self.functions)} functions, {len(self.files)} files"

    def hops(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yield thread, file and functions each time that a thread enters functions of a file that are new to it."""
        seen = set(self.passing)
        for thread in dict.fromkeys(call.thread for call in self.calls):
            file, functions = "", list[str]()
            for call in self.calls:
                if call.thread != thread or call[1:] in seen:
                    continue
                seen.add(call[1:])
                if call.file != file and functions:
                    yield thread, file, functions
                    functions = []
                file = call.file
                functions.append(call.function)
            if functions:
                yield thread, file, functions


def shortest(tries: list[tuple[Call, ...]]) -> Walk:
    """Return the walk of several tries."""
    entered = [{call[1:] for call in calls} for calls in tries]
    passing = set.union(*entered) - set.intersection(*entered)
    return Walk(min(tries, key=len), tuple(sorted(passing)))


class Recorder:
    """Notes each function of `fd_core` that a thread enters while `records`; a coroutine counts once, not per turn."""

    def __init__(self) -> None:
        self.records = False
        self._calls: list[Call] = []
        self._suspended: dict[int, FrameType] = {}
        self._files: dict[CodeType, str | None] = {}
        self._between: tuple[str, tuple[str, ...]] | None = None

    def between(self, first: str, *last: str) -> None:
        """Record from the entry of one function to that of one of others, once."""
        self._between = first, last

    def take(self) -> tuple[Call, ...]:
        """Return the calls recorded since the last call."""
        self.records = False
        calls = tuple(self._calls)
        self._calls, self._suspended = [], {}
        return calls

    @contextmanager
    def installed(self) -> Iterator[Recorder]:
        """Trace this thread and all that begin meanwhile."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield self
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if self._between:
            first, last = self._between
            if not self.records and code.co_qualname.endswith(first):
                self.records = True
            elif self.records and code.co_qualname in last:
                self._note(frame, code)
                self.records, self._between = False, None
                return
        if self.records:
            self._note(frame, code)

    def _note(self, frame: FrameType, code: CodeType) -> None:
        file = self._files[code] if code in self._files else self._files.setdefault(code, _file_of(code))
        if file is None or self._suspended.get(id(frame)) is frame:
            return
        if code.co_flags & 0x2A0:  # a generator, a coroutine or an asynchronous generator
            self._suspended[id(frame)] = frame
        self._calls.append(Call(threading.current_thread().name, file, code.co_qualname))


def _file_of(code: CodeType) -> str | None:
    path = Path(code.co_filename)
    if code.co_name in _PARTS or not path.is_relative_to(ROOT):
        return None
    return path.relative_to(ROOT).as_posix()


def chat(recorder: Recorder, tokens: int) -> Walk:
    """Stream a chat from the null backend, the engine in a thread; the third request and the two after it."""
    from tests.server.fakes import live
    from tests.server.test_null_engine import null_client

    def ask() -> None:
        fields = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": tokens, "stream": True}
        answer = server.post("/v1/chat/completions", {"model": "null", "seed": 1, "temperature": 0.0, **fields})
        assert answer.status == 200
        time.sleep(_PAUSE)

    tries = []
    with live(null_client) as server:
        ask()
        ask()
        for _ in range(_TRIES):
            recorder.records = True
            ask()
            tries.append(recorder.take())
    return shortest(tries)


def _let_copies_end_first(engine: Engine) -> None:
    """Collect no step while KV is copied on another thread, so that each try contains the whole copy."""
    device, pending = engine.probe().device, engine._outside._offload._pending._pending  # type: ignore[attr-defined]
    collect = device.collect

    def collect_later(timeout: float) -> StepOutput:
        while pending:
            time.sleep(0.001)
        time.sleep(0.005)
        return collect(timeout)

    device.collect = collect_later  # type: ignore[method-assign]


def preemption(recorder: Recorder) -> Walk:
    """Run requests on too few KV blocks; from the choice of a victim until it is in the queue again."""
    from tests.engine.helpers import null_engine
    from tests.engine.stepping import greedy

    tries = []
    for _ in range(_TRIES):
        engine = null_engine(num_kv_blocks=26, max_num_seqs=6)
        for number in range(8):
            engine.submit(greedy(f"r{number}", range(number, number + 40), 100))
        _let_copies_end_first(engine)
        recorder.between(".choose", *_WAITS)
        while engine.has_work:
            engine.step()
        engine.close()
        tries.append(recorder.take())
        assert tries[-1][-1].function in _WAITS, "no request was preempted"
    return shortest(tries)


def prefill_to_decode(recorder: Recorder) -> Walk:
    """Compute a prompt on one worker and continue from its KV on another."""
    from tests.engine.building.test_kv_transfer import pair
    from tests.engine.stepping import greedy

    tries = []
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_bytes(b"of sixteen bytes")
        secret.chmod(0o600)
        with pair(str(secret)) as two:
            for number in range(2 + _TRIES):
                recorder.records = number >= 2
                two.run(greedy(f"r{number}", range(number, number + 40), 2))
                tries.append(recorder.take())
    return shortest(tries[2:])


SCENARIOS: Final[dict[str, Callable[[Recorder], Walk]]] = {
    "Chat to token": lambda recorder: chat(recorder, 1),
    "Nine tokens": lambda recorder: chat(recorder, 9),
    "Preempted slot and back": preemption,
    "Prefill to decode": prefill_to_decode,
}


def walks(names: Iterable[str] = SCENARIOS) -> dict[str, Walk]:
    """Run scenarios under the tracer, which would trace their imports as well."""
    for module in ("engine.building.test_kv_transfer", "server.test_null_engine"):
        importlib.import_module(f"tests.{module}")
    with Recorder().installed() as recorder:
        return {name: SCENARIOS[name](recorder) for name in names}


TOUR: Final = ROOT.parent / "docs" / "understand" / "tour.md"
_THREADS: Final = {
    "Thread-1 (_main)": "On the server's event loop",
    "fdcore-text_0": "In the template thread",
    "fdcore-engine": "In the engine thread",
    "fdcore-device": "In the device thread",
    "fdcore-kv-copy": "In the KV copy thread",
    "MainThread": "In the engine thread",
    "fdcore-kv-sender": "In the KV sender thread",
    "fdcore-kv-receiver": "In the KV receiver thread",
}
"""Titles of the threads in the tour."""


def section(name: str, walk: Walk) -> str:
    """Return a walk as the tour shows it."""
    lines = [f"## {name}", "", f"{walk.cost()}. Each function is listed where a thread first enters it."]
    last = ""
    for number, (thread, file, functions) in enumerate(walk.hops(), 1):
        if thread != last:
            lines += ["", f"{_THREADS.get(thread, thread)}:", ""]
            last = thread
        lines.append(f"{number}. `{file}`: {', '.join(f'`{each}`' for each in functions)}")
    return "\n".join(lines) + "\n\n"


def rewrite(text: str, found: dict[str, Walk]) -> str:
    """Return the text of the tour with these walks in it."""
    for name, walk in found.items():
        before, heading, rest = text.partition(f"## {name}\n")
        if heading:
            text = before + section(name, walk) + "## " + rest.partition("\n## ")[2]
    return text


def main() -> None:
    """Print the walks; with `--json`, for the test."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="put them into the tour")
    asked = parser.parse_args()
    found = walks(asked.names)
    if asked.json:
        sys.stdout.write(msgspec.json.encode(found).decode())
        return
    if asked.write:
        TOUR.write_text(rewrite(TOUR.read_text(), found))
        return
    for name, walk in found.items():
        print(f"{name}: {walk.cost()}")
        for (thread, file), calls in itertools.groupby(walk.calls, key=lambda call: call[:2]):
            print(f"  {thread:16} {file:40} {', '.join(call.function for call in calls)}")
    for name, walk in found.items():
        print(f"{name}: {walk.cost()}")


if __name__ == "__main__":
    main()
