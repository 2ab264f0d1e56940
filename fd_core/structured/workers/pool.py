"""A few processes that make and compile grammars for a server, with limits of time, memory and slots for each client.

    run --slot of the client--> process that is idle, or a new one --ConstraintOutcome or its death--> cache

A task that takes too long, or too much memory, ends with its process; the next task gets another one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import signal
import subprocess
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Final

import msgspec

from fd_core.errors import BadRequest
from fd_core.launching.child import child_command, child_socket
from fd_core.launching.message_stream import MessageSocket
from fd_core.structured.compiler import VocabularyTable
from fd_core.structured.grammar import RequestedConstraint
from fd_core.structured.workers.messages import CPU_SECONDS, INVALID, ConstraintOutcome
from fd_core.text.fair_thread import CLIENT

_log = logging.getLogger(__name__)

_PROCESSES: Final = 4
_SLOTS: Final = 3
"""Tasks of one client at a time: fewer than there are processes, so that no client has all of them."""
_START_SECONDS: Final = 60.0
_HEAVY_SECONDS: Final = 0.05
"""CPU time of a task after which its slot pauses, because the engine compiles the same grammar again."""
_REST: Final = 4.0
"""Pause of a slot, as a multiple of its task's CPU time."""
_KILLED: Final = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a process that was killed from outside, such as by the system when memory is short."""
_MAX_ANSWER: Final = 64 * 2**20
"""Limit in bytes of a response, more than a process generates within its limits."""
_MAX_CACHED: Final = 512
_MAX_CACHED_BYTES: Final = 16 * 2**20


class CompilePool:
    """Used by one event loop."""

    def __init__(self, table: Callable[[], VocabularyTable], *, seconds: float = 10.0) -> None:
        """`table` returns the vocabulary, or raises `ValueError`; a task may run for `seconds` on a busy machine."""
        self._make_table = table
        self._table: asyncio.Task[bytes] | None = None
        self._seconds = seconds
        self._idle: list[_Process] = []
        self._processes: set[_Process] = set()
        self._slots = _TaskSlots(_PROCESSES, _SLOTS)
        self._running: dict[bytes, asyncio.Task[ConstraintOutcome]] = {}
        self._waiters: Counter[bytes] = Counter()
        """Number of waiters of each of them."""
        self._cache: OrderedDict[bytes, ConstraintOutcome] = OrderedDict()
        self._cached_bytes = 0
        self._warming: asyncio.Task[None] | None = None

    def warm_up(self, after: float = 0.0) -> None:
        """Start a process before the first task needs it, in `after` seconds."""
        if self._warming is None:
            self._warming = asyncio.create_task(self._warm(after))

    async def run(self, asked: RequestedConstraint) -> ConstraintOutcome:
        """Return the outcome of an output constraint. Equal ones are compiled once for all requests that wait for them.

        Raises `BadRequest` if it cannot be sent, or the model's vocabulary is not supported; `OSError`, `EOFError` or
        `TimeoutError` if no process can be started.
        """
        try:
            task = _encoded(asked)
        except (ValueError, TypeError, RecursionError) as error:
            raise BadRequest(f"{asked.field}: invalid JSON: {error}", field=asked.field, code=INVALID) from None
        digest = hashlib.blake2b(task, digest_size=32).digest()
        found = self._cache.get(digest)
        if found is not None:
            self._cache.move_to_end(digest)
            return found
        running = self._running.get(digest)
        if running is None:
            running = self._running[digest] = asyncio.create_task(self._computed(digest, task, asked.field))
        self._waiters[digest] += 1
        try:
            return await asyncio.shield(running)
        finally:
            self._waiters[digest] -= 1
            if not self._waiters[digest]:
                del self._waiters[digest]
                self._running.pop(digest, None)
                running.cancel()  # no request waits for it

    def close(self) -> None:
        """Kill every process and wait for its exit."""
        for task in (*self._running.values(), self._table, self._warming):
            if task is not None:
                task.cancel()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()

    # Tasks ------------------------------------------------------------------------------------------------

    async def _computed(self, digest: bytes, task: bytes, field: str) -> ConstraintOutcome:
        client, cost = CLIENT.get(), 0.0
        await self._slots.take(client)
        try:
            outcome, is_final = await self._sent(task, field)
            cost = outcome.cpu_seconds
        finally:
            self._slots.free(client, cost * _REST if cost > _HEAVY_SECONDS else 0.0)
        if is_final:
            self._cache[digest] = outcome
            self._cached_bytes += len(outcome.grammar)
            while len(self._cache) > _MAX_CACHED or (self._cached_bytes > _MAX_CACHED_BYTES and len(self._cache) > 1):
                self._cached_bytes -= len(self._cache.popitem(last=False)[1].grammar)
        return outcome

    async def _sent(self, task: bytes, field: str, *, again: bool = True) -> tuple[ConstraintOutcome, bool]:
        """Return the outcome of a task in a process, and True if a retry would have the same outcome.

        A task whose process is killed from outside is sent to another one.
        """
        process = await self._take()
        is_idle = False
        try:
            async with asyncio.timeout(self._seconds):
                answer = await process.ask(task)
            is_idle = True
            return msgspec.msgpack.decode(answer, type=ConstraintOutcome), True
        except TimeoutError:
            return self._refused(field, f"compiling takes more than {self._seconds:g} s"), False
        except (OSError, EOFError):
            code = process.wait()
            _log.warning("the grammar of %s (%d bytes) killed its process, exit code %s", field, len(task), code)
            if code == -signal.SIGXCPU:
                return self._refused(field, f"compiling takes more than {CPU_SECONDS} s of CPU time"), True
            if code in _KILLED and again:
                return await self._sent(task, field, again=False)
            return self._refused(field, "compiling takes too much memory, or nests too deeply"), code not in _KILLED
        finally:
            if is_idle:
                self._idle.append(process)
            else:
                self._end(process)
                self.warm_up()

    @staticmethod
    def _refused(field: str, reason: str) -> ConstraintOutcome:
        return ConstraintOutcome(message=f"{field}: {reason}; simplify it", field=field, code=INVALID)

    # Processes --------------------------------------------------------------------------------------------

    async def _take(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive():
                return process
            self._end(process)
        if self._table is None:
            self._table = asyncio.create_task(asyncio.to_thread(lambda: msgspec.msgpack.encode(self._make_table())))
        try:
            table = await asyncio.shield(self._table)
        except ValueError as error:
            raise BadRequest(str(error), code=INVALID) from None
        process = _Process()
        self._processes.add(process)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await process.ask(table)
        except BaseException:
            self._end(process)
            raise
        return process

    async def _warm(self, after: float) -> None:
        try:
            await asyncio.sleep(after)
            self._idle.append(await self._take())
        except (BadRequest, OSError, EOFError) as error:  # a timeout is an `OSError`
            reason = "its process ended during startup" if isinstance(error, EOFError) else error
            _log.warning("structured output is not available: %s", reason)
        finally:
            self._warming = None

    def _end(self, process: _Process) -> None:
        self._processes.discard(process)
        process.kill()
        # Its memory may take a while to be freed.
        asyncio.get_running_loop().run_in_executor(None, process.wait)


def _encoded(asked: RequestedConstraint) -> bytes:
    try:
        return msgspec.json.encode(asked)
    except OverflowError:  # an integer of more than 64 bits, which the slower encoder supports
        return json.dumps(msgspec.to_builtins(asked), allow_nan=False).encode()


class _Process:
    """One process and the socket to it."""

    def __init__(self) -> None:
        """Start a process that waits for the vocabulary. Raises `OSError`."""
        with child_socket() as (own, theirs):
            self._process = subprocess.Popen(
                child_command((), "-m", "fd_core.structured.workers.child"),
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a panic may quote a grammar
                start_new_session=True,
            )
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._socket = MessageSocket(own, self._answered, self._failed, limit=_MAX_ANSWER)

    async def ask(self, body: bytes) -> bytes:
        """Send a frame and return the answer. Raises `EOFError` if the process ended."""
        self._answer = asyncio.get_running_loop().create_future()
        self._socket.send(body)
        return await self._answer

    def _answered(self, message: bytes) -> None:
        if not self._answer.done():
            self._answer.set_result(message)

    def _failed(self, error: Exception) -> None:
        self.kill()
        if not self._answer.done():
            self._answer.set_exception(error)

    def is_alive(self) -> bool:
        """Return True if it has not ended."""
        return not self._socket.ended and self._process.poll() is None

    def wait(self) -> int:
        """Return the exit code of a process that was killed, or closed its socket."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill it; `wait` returns when it has exited."""
        self._process.kill()
        self._socket.close()


class _TaskSlots:
    """Slots for tasks, granted to waiting clients in turn."""

    def __init__(self, total: int, each: int) -> None:
        self._free = total
        self._each = each
        self._used: Counter[str] = Counter()
        """Slots of each client, those that rest included."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By client, the client whose turn is next at the beginning."""

    async def take(self, client: str) -> None:
        """Wait for a slot."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._assign()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.free(client, 0.0)
            self._assign()
            raise

    def free(self, client: str, rest: float) -> None:
        """Free a slot, which the client gets again after `rest` seconds."""
        self._free += 1
        if rest:
            asyncio.get_running_loop().call_later(rest, self._rested, client)
        else:
            self._rested(client)
        self._assign()

    def _rested(self, client: str) -> None:
        self._used[client] -= 1
        if not self._used[client]:
            del self._used[client]
        self._assign()

    def _assign(self) -> None:
        for client in [*self._waiting]:
            turns = self._waiting[client]
            while turns and turns[0].cancelled():
                turns.popleft()
            if turns and self._free and self._used[client] < self._each:
                self._free -= 1
                self._used[client] += 1
                turns.popleft().set_result(None)
                self._waiting.move_to_end(client)
            if not turns:
                del self._waiting[client]
