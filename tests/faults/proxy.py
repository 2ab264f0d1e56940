"""TCP proxy that can slow down, stall or break the connection to a server."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Proxy"]


class Proxy:
    """Forwards connections to a TCP port; responses can be delayed or split at any time."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._pause = 0.0
        self._piece = 65536
        self._ended = False
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.port = int(self._listener.getsockname()[1])
        self._start(self._accept)

    @contextmanager
    def answering(self, *, pause: float, piece: int = 65536) -> Iterator[None]:
        """Forward responses in pieces of that many bytes, with a pause before each."""
        self._pause, self._piece = pause, piece
        try:
            yield
        finally:
            self._pause, self._piece = 0.0, 65536

    def close(self) -> None:
        self._ended = True
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, what: object, *arguments: object) -> None:
        self._threads.append(threading.Thread(target=what, args=arguments))  # type: ignore[arg-type]
        self._threads[-1].start()

    def _accept(self) -> None:
        while not self._ended:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            client.settimeout(None)
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._open |= {client, server}
            self._start(self._forward, client, server, False)
            self._start(self._forward, server, client, True)

    def _forward(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                while data and not self._ended:
                    ends = time.monotonic() + (self._pause if answers else 0.0)
                    while not self._ended and self._pause and time.monotonic() < ends:
                        time.sleep(0.005)
                    count = self._piece if answers else len(data)
                    target.sendall(data[:count])
                    data = data[count:]
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
            self._open.discard(one)
