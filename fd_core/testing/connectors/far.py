"""Connectors in another process, used like those in this process."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from fd_core.disagg.connectors.contract import Bytes, Connector, ConnectorError, KVInbox, KVOutbox, PutResult
from fd_core.testing.connectors.far_messages import Answer, Call, Census, Recipe, read, write
from fd_core.testing.connectors.recipe import settings_of


class FarSide:
    """Another process with connectors."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fd_core.testing.connectors.far_process"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, call: Call) -> Answer:
        """Have the other process make a call. Raises `ConnectorError` if the call did."""
        write(cast(BinaryIO, self._process.stdin), call)
        encoded = read(cast(BinaryIO, self._process.stdout))
        assert encoded is not None, "the other process of the kit ended"
        answer = msgspec.msgpack.decode(encoded, type=Answer)
        if answer.refused is not None:
            raise ConnectorError(answer.refused)
        assert answer.broken is None, f"the connector raised something else than ConnectorError: {answer.broken}"
        return answer

    def number(self) -> int:
        """Return a number for an object that is made in the other process."""
        return next(self._numbers)

    def make(self, recipe: Recipe) -> Connector:
        """Make a connector in the other process."""
        made = self.number()
        self.ask(Call("make", 0, made, recipe=recipe))
        return _FarConnector(self, made, recipe)

    def census(self) -> Census:
        """Return what the other process holds."""
        counted = self.ask(Call("census", 0)).census
        assert counted is not None
        return counted

    def kill(self) -> None:
        """Kill the other process and wait for its end."""
        self._process.kill()
        self._process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the other process while the context lasts."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the other process and close its pipes."""
        with self._process:
            self._process.kill()


class _FarConnector(Connector):
    def __init__(self, side: FarSide, number: int, recipe: Recipe) -> None:
        super().__init__(settings_of(recipe))
        self._side, self._number = side, number

    def open_inbox(self, lease: str, *, pieces: range, window: int, value_bytes: int) -> KVInbox:
        call = Call(
            "open_inbox",
            self._number,
            self._side.number(),
            lease=lease,
            first=pieces.start,
            stop=pieces.stop,
            window=window,
            value_bytes=value_bytes,
        )
        return _FarInbox(self._side, call.made, self._side.ask(call).data)

    def open_outbox(self, lease: str, address: bytes, *, window: int, value_bytes: int) -> KVOutbox:
        call = Call(
            "open_outbox",
            self._number,
            self._side.number(),
            lease=lease,
            address=address,
            window=window,
            value_bytes=value_bytes,
        )
        self._side.ask(call)
        return _FarOutbox(self._side, call.made)

    def close(self) -> None:
        self._side.ask(Call("close", self._number))
        self._side.ask(Call("forget", self._number))


class _FarInbox(KVInbox):
    def __init__(self, side: FarSide, number: int, address: bytes) -> None:
        self._side, self._number, self.address = side, number, address

    def take(self, index: int, reference: bytes, frames: Sequence[Bytes]) -> Bytes:
        buffers = tuple(bytes(frame) for frame in frames)
        return self._side.ask(Call("take", self._number, index=index, reference=reference, buffers=buffers)).data

    def done(self, index: int, reference: bytes) -> None:
        self._side.ask(Call("done", self._number, index=index, reference=reference))

    def close(self) -> None:
        self._side.ask(Call("close", self._number))


class _FarOutbox(KVOutbox):
    def __init__(self, side: FarSide, number: int) -> None:
        self._side, self._number = side, number

    def put(self, index: int, parts: Sequence[Bytes]) -> PutResult:
        buffers = tuple(bytes(part) for part in parts)
        answer = self._side.ask(Call("put", self._number, index=index, buffers=buffers))
        return PutResult(answer.data, answer.frames)

    def close(self) -> None:
        self._side.ask(Call("close", self._number))
