"""Entry point of a rank's process: `python -m fd_core.engine.ranks.child`, launched by `leading`."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import zmq

from fd_core.config import Limits
from fd_core.effects.sockets import Context, Socket, open_socket
from fd_core.engine.clients.client import StartProgress
from fd_core.engine.computing import Computing
from fd_core.engine.process.messages import Fault
from fd_core.engine.ranks import messages
from fd_core.engine.ranks.groups import joined_group
from fd_core.engine.ranks.stages import EarlierStageRunner, shared_memory
from fd_core.errors import FdError, ModelError
from fd_core.launching.child import become_child
from fd_core.ops.parallel import Parallel, RankExchangeError, RankGroup
from fd_core.runner.runner import Runner, RunnerAdapters

_log = logging.getLogger(__name__)
_LINGER_MS: Final = 2000
_SIGN_SECONDS: Final = 0.5
"""Interval between two heartbeats of a rank that loads, in seconds."""


def main() -> int:
    """Execute the orders of rank 0 until it disconnects."""
    become_child()
    endpoint = msgspec.json.decode(os.environ.pop(messages.RANK_ENDPOINT), type=messages.RankEndpoint)
    context = zmq.Context(1)
    steps = _connected(context, endpoint.steps, endpoint.keys)
    start = msgspec.json.decode(steps.recv(), type=messages.RankStart)
    parallel = Parallel(start.rank, start.config.num_ranks)
    copies = _Copies(_connected(context, endpoint.copies, endpoint.keys))
    group = joined_group(parallel, start.group_address, start.config.rank_seconds)

    def send(message: messages.RankMessage) -> None:
        steps.send(msgspec.msgpack.encode(message))

    try:
        computing, runner = _load(start, group, steps, send=send, progress=copies.report_progress)
        copies.begin(runner)
        # Loaded objects live as long as the process: the garbage collector need not scan them during a step.
        gc.collect()
        gc.freeze()
        send(messages.RankReady())
        _execute(steps, computing, runner, send)
    except FdError as error:
        send(Fault.of(error))
    except RankExchangeError as error:
        if not group.abandoned:  # else another rank has reported the cause, or died before
            send(Fault(str(error)))
    except MemoryError as error:
        send(Fault("it ran out of memory" + (f": {error}" if str(error) else "")))
    except Exception as error:  # noqa: BLE001 - last frame of the process: notify rank 0, then end
        _log.exception("rank %d failed", start.rank)
        send(Fault(f"{type(error).__name__}: {error}"))
    group.abandon()
    steps.close(linger=_LINGER_MS)
    context.term()
    return 1


def _connected(context: Context, address: str, keys: tuple[str, str, str] | None) -> Socket:
    socket = open_socket(context, zmq.PAIR)
    socket.rcvhwm = 0
    if keys is not None:
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (key.encode() for key in keys)
    socket.connect(address)
    return socket


def _load(
    start: messages.RankStart,
    group: RankGroup,
    steps: Socket,
    send: Callable[[messages.RankMessage], None],
    progress: StartProgress,
) -> tuple[Computing, Runner]:
    """Load this rank's share of the model, and allocate memory within the limits of rank 0."""
    path = Path(start.path) if start.path is not None else None
    computing = Computing(start.config, path, progress, group=group)
    send(computing.loaded())
    limits = msgspec.msgpack.decode(steps.recv(), type=Limits)
    make = partial(EarlierStageRunner, shared_memory(group)) if limits.num_stages > 1 else Runner
    return computing, computing.runner(limits, make)


def _execute(steps: Socket, computing: Computing, runner: Runner, send: Callable[[messages.RankMessage], None]) -> None:
    while True:
        frame = steps.recv()
        if frame == messages.WARM_UP:
            runner.warm_up(lambda *_: None)
        if frame in (messages.WARM_UP, messages.LIVENESS_CHECK):
            send(messages.RankReady())
            continue
        order = messages.decode_order(frame)
        if isinstance(runner, EarlierStageRunner) and not isinstance(order, messages.ChangeModel):
            runner.receive(order)
            continue
        match order:
            case messages.RankStep(plan, slots, drafts, counts):
                runner.batch.num_drafts[:] = 0
                runner.batch.guess(slots, drafts, counts)
                send(messages.StepDigest(plan.step, messages.step_digest(frame, runner.execute(plan))))
            case messages.HoldAdapters() as asked:
                send(_changed(partial(_hold, runner.adapters, asked)))
            case messages.ChangeModel() as asked:
                send(_changed(partial(computing.change_own, asked, runner)))


def _changed(change: Callable[[], str]) -> messages.RankChanged:
    try:
        return messages.RankChanged(digest=change())
    except (ModelError, MemoryError) as error:
        return messages.RankChanged(str(error) or "it ran out of memory")


def _hold(adapters: RunnerAdapters, asked: messages.HoldAdapters) -> str:
    known = {adapter.digest: adapter for adapter in (*adapters.held, *asked.new)}
    adapters.replace(known[digest] for digest in asked.digests)
    return ""


class _Copies:
    """The thread that sends heartbeats while this rank loads, and then copies blocks while steps are executed."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._runners: queue.SimpleQueue[Runner] = queue.SimpleQueue()
        self._sign = messages.SIGN
        threading.Thread(target=self._run, name="fdcore-copies", daemon=True).start()

    def report_progress(self, *place: object) -> None:
        self._sign = messages.SIGN + repr(place).encode()

    def begin(self, runner: Runner) -> None:
        self._runners.put(runner)

    def _run(self) -> None:
        try:
            runner = None
            while runner is None:
                self._socket.send(self._sign)
                with contextlib.suppress(queue.Empty):
                    runner = self._runners.get(timeout=_SIGN_SECONDS)
            while True:
                self._copy(runner)
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _copy(self, runner: Runner) -> None:
        _, blocks, data = messages.decode_blocks(self._socket.recv_multipart())
        try:
            if data is None:
                answer = messages.encode_blocks(blocks, runner.cache.export_blocks(blocks))
            else:
                runner.cache.import_blocks(blocks, data)
                answer = messages.encode_blocks(blocks)
        except Exception as error:  # noqa: BLE001 - it ends that copy only
            text = f"{type(error).__name__}: {error}"
            answer = [msgspec.msgpack.encode(messages.BlockCopy(b"", error=text))]
        self._socket.send_multipart(answer)


if __name__ == "__main__":
    sys.exit(main())
