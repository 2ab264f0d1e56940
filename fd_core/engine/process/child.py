"""Entry point of an engine's process, run by `fd_core.launching.child`: `-m fd_core.engine.process.child BACKEND`."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import sys
from pathlib import Path
from typing import Final

import msgspec

from fd_core.engine.building.builder import load_engine
from fd_core.engine.process.messages import ClientMessage, EngineMessage, Fault, Progress, Ready, Shutdown, Start
from fd_core.engine.process.service import admission_notifier, serve_engine
from fd_core.errors import FdError
from fd_core.launching.child import become_child
from fd_core.launching.message_stream import MessageStream
from fd_core.plugins import installed_plugins

_log = logging.getLogger(__name__)
_LINGER_SECONDS: Final = 2.0
"""Time to flush the last messages of an engine, in seconds."""
_IDLE_SECONDS: Final = 60.0


class _SocketInbox:
    def __init__(self, stream: MessageStream) -> None:
        self._stream = stream
        self._decoder = msgspec.msgpack.Decoder(ClientMessage)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)

    def receive(self, timeout: float) -> list[ClientMessage]:
        stream = self._stream
        stream.flush()
        if timeout:
            self._poll.register(stream, select.POLLIN | select.POLLOUT if stream.unsent else select.POLLIN)
            if any(descriptor == self._woken for descriptor, _ in self._poll.poll(timeout * 1000)):
                os.read(self._woken, 4096)
        messages: list[ClientMessage] = []
        while (frames := stream.receive()) is not None:
            messages += map(self._decoder.decode, frames)
        # Without a client there is nothing to compute.
        return [*messages, Shutdown(drain=False)] if stream.ended else messages

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # wake-ups are pending already
            os.write(self._wake, b"\0")


def main(backend: str) -> int:
    """Serve the client at the other end of standard input; the framework of `backend` is imported before `Start`."""
    become_child()
    stream = MessageStream.to_parent()
    inbox, encoder = _SocketInbox(stream), msgspec.msgpack.Encoder()

    def send(message: EngineMessage) -> None:
        stream.send(encoder.encode(message))

    try:
        # Imported objects live as long as the process: collections among them take a fifth of the imports' time.
        gc.disable()
        installed_plugins().choose_backend(backend).cls.import_framework()
        gc.freeze()
        gc.enable()
        while not (messages := inbox.receive(_IDLE_SECONDS)):
            pass
        if not isinstance(start := messages[0], Start):
            return 0  # the parent has no model for this process
        path = Path(start.path) if start.path is not None else None
        engine = load_engine(
            start.config,
            path,
            epoch=start.epoch,
            progress=lambda phase, done, total: send(Progress(phase, done, total)),
            wake=inbox.wake,
            admitted=admission_notifier(send, start.epoch),
        )
        # Loaded objects live as long as the process: the garbage collector need not scan them during a step.
        gc.collect()
        gc.freeze()
        send(Ready(engine.info))
        serve_engine(engine, inbox, send)
    except FdError as error:
        send(Fault.of(error))
        return error.exit_code
    except MemoryError:
        _log.error("the engine ran out of memory")  # a traceback would need more
        hint = "provide more memory, lower --max-num-batched-tokens, or use a smaller model or quantized weights"
        send(Fault("the engine's process ran out of memory", hint=hint))
        return 1
    except Exception as error:  # noqa: BLE001 - last frame of the process: notify the client, then end
        _log.exception("the engine failed")
        send(Fault(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        stream.close(_LINGER_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
