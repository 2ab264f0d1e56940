"""An engine's own process; `fd_core.engine.process` starts it through `fd_core.engine.child_on_cores`."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import zmq

from fd_core.engine.builder import load_engine
from fd_core.engine.messages import ClientMessage, EngineMessage, Fault, Progress, Ready
from fd_core.engine.process import Start
from fd_core.engine.service import serve_engine, tells_admissions
from fd_core.errors import FdError
from fd_core.logs import configure_logs
from fd_core.parent_watch import end_with_parent

_log = logging.getLogger(__name__)


class _SocketInbox:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(ClientMessage)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)

    def receive(self, timeout: float) -> list[ClientMessage]:
        messages: list[ClientMessage] = []
        if timeout:
            ready = dict(self._poller.poll(int(timeout * 1000)))
            if self._woken in ready:
                os.read(self._woken, 4096)
            if self._socket not in ready:
                return messages
        try:
            while True:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of calls already
            os.write(self._wake, b"\0")


def main() -> int:
    """Serve one client until it says so or is gone."""
    # Ctrl-C and hangups reach the whole terminal group; when to stop is the client's decision.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    level, form = os.environ.get("FD_LOG_LEVEL", "WARNING"), os.environ.get("FD_LOG_FORMAT", "text")
    access = os.environ.get("FD_ACCESS_LOG") == "1"
    configure_logs(level, form, text="%(levelname)s %(message)s", access=access)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    end_with_parent()
    context = zmq.Context(1)
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(start.address)
    encoder = msgspec.msgpack.Encoder()

    def send(message: EngineMessage) -> None:
        socket.send(encoder.encode(message))

    try:
        inbox = _SocketInbox(socket)
        path = Path(start.path) if start.path is not None else None
        engine = load_engine(
            start.config,
            path,
            epoch=start.epoch,
            progress=lambda phase, done, total: send(Progress(phase, done, total)),
            wake=inbox.wake,
            admitted=tells_admissions(send, start.epoch),
        )
        # Loaded objects live as long as the process: the garbage collector need not visit them during a step.
        gc.collect()
        gc.freeze()
        send(Ready(engine.info))
        serve_engine(engine, inbox, send)
    except FdError as error:
        send(Fault(error.message, error.field, error.hint, error.exit_code))
        return error.exit_code
    except MemoryError:
        _log.error("the engine has no memory left")  # a traceback would need more
        send(Fault("the engine's process has no memory left"))
        return 1
    except Exception as error:  # noqa: BLE001 - last frame of the process: tell the client, then end
        _log.exception("the engine failed")
        send(Fault(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        socket.close(linger=2000)
        context.term()
    return 0
