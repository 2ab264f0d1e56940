"""Connectors in another process, used like local ones."""

from __future__ import annotations

import importlib
import os
import signal
import struct
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec

from fd_core.disagg.connectors import contract
from fd_core.kv.stores.contract import KVStore
from fd_core.kv.stores.location import parse_location
from fd_core.testing.kit.privacy import created_paths, open_paths
from fd_core.testing.kit.processes import ResourceSnapshot, python, resource_snapshot

_LENGTH: Final = struct.Struct("<I")


class Recipe(NamedTuple):
    """Settings from which each process creates a connector."""

    cls: str
    """`module:Class`."""
    kv_store: str | None
    timeout: float

    def settings(self) -> contract.ConnectorSettings:
        """Return the settings from which an engine would create the connector."""
        return contract.ConnectorSettings(partial(_make_store, self.kv_store) if self.kv_store else None, self.timeout)

    def make(self) -> contract.Connector:
        """Import the class of the connector and create an instance."""
        module, _, name = self.cls.partition(":")
        made: contract.Connector = getattr(importlib.import_module(module), name)(self.settings())
        return made


def _make_store(text: str) -> KVStore:
    from fd_core.plugins import STORE, installed_plugins

    location = parse_location(text)
    return installed_plugins().load(STORE, location.scheme)(location)


class Call(msgspec.Struct, frozen=True):
    """A method call on `target`, the number of a connector or an end in the other process; 0 is that process."""

    method: str
    target: int
    arguments: tuple[Any, ...]


class Answer(msgspec.Struct, frozen=True):
    """Result of a call: a value or an exception."""

    value: Any = None
    refused: str | None = None
    """Text of a `ConnectorError`."""
    broken: str | None = None
    """Type and text of any other exception, which violates the contract."""


def write(stream: IO[bytes], message: Call | Answer) -> None:
    """Write one message."""
    encoded = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(encoded)) + encoded)
    stream.flush()


def read(stream: IO[bytes]) -> bytes | None:
    """Read one encoded message; None if the other process exited."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    encoded = stream.read(length)
    return encoded if len(encoded) == length else None


class _Remote:
    def __init__(self, created: Collection[Path]) -> None:
        self._made: dict[int, Any] = {}
        self._created = created

    def answer(self, call: Call) -> Answer:
        try:
            return Answer(self._do(call.method, self._made.get(call.target), call.target, *call.arguments))
        except contract.ConnectorError as error:
            return Answer(refused=str(error))
        except Exception as error:  # noqa: BLE001 -- reported to the test, which fails
            return Answer(broken=f"{type(error).__name__}: {error}")

    def _do(self, method: str, target: Any, number: int, *arguments: Any) -> Any:
        match method, *arguments:
            case "make", *parts:
                return self._keep(Recipe(*parts).make())
            case "open_inbox", lease, first, stop, window, value_bytes:
                inbox = target.open_inbox(lease, pieces=range(first, stop), window=window, value_bytes=value_bytes)
                return self._keep(inbox), inbox.address
            case "open_outbox", lease, address, window, value_bytes:
                return self._keep(target.open_outbox(lease, address, window=window, value_bytes=value_bytes))
            case "put", index, parts:
                put = target.put(index, tuple(parts))
                return put.reference, [bytes(frame) for frame in put.frames]
            case "take", index, reference, frames:
                return bytes(target.take(index, reference, tuple(frames)))
            case "forget", *_:
                del self._made[number]
            case "census", *_:
                return resource_snapshot()
            case "created", *_:
                return [str(path) for path in (*self._created, *open_paths()) if path.exists()]
            case _:
                getattr(target, method)(*arguments)
        return None

    def _keep(self, made: Any) -> int:
        number = max(self._made, default=0) + 1
        self._made[number] = made
        return number


def serve() -> None:
    """Serve calls of connectors in this process, the remote one of the kit, until its input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of the connector must not mix with the responses
    with created_paths() as created:
        far = _Remote(created)
        while (encoded := read(sys.stdin.buffer)) is not None:
            write(answers, far.answer(msgspec.msgpack.decode(encoded, type=Call)))


class RemoteProcess:
    """Another process with connectors."""

    def __init__(self) -> None:
        self._process = python(f"from {__name__} import serve; serve()")
        self.created = list[str]()
        """Files, folders and memory that connectors had left there when it was killed."""

    def ask(self, method: str, target: int, *arguments: Any) -> Any:
        """Execute a call in the other process. Raises `ConnectorError` if the call did."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        write(self._process.stdin, Call(method, target, arguments))
        encoded = read(self._process.stdout)
        assert encoded is not None, "the remote process of the kit exited"
        answer = msgspec.msgpack.decode(encoded, type=Answer)
        if answer.refused is not None:
            raise contract.ConnectorError(answer.refused)
        assert answer.broken is None, f"expected only ConnectorError from the connector, got {answer.broken}"
        return answer.value

    def make(self, recipe: Recipe) -> contract.Connector:
        return _RemoteConnector(self, self.ask("make", 0, *recipe), recipe)

    def resource_snapshot(self) -> ResourceSnapshot:
        return ResourceSnapshot(*self.ask("census", 0))

    def kill(self) -> None:
        self.created = self.ask("created", 0)
        self._process.kill()
        self._process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Suspend the other process for the duration of the context."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        with self._process:
            self._process.kill()


class _RemoteConnector(contract.Connector):
    def __init__(self, side: RemoteProcess, number: int, recipe: Recipe) -> None:
        super().__init__(recipe.settings())
        self._side, self._number = side, number

    def open_inbox(self, lease: str, *, pieces: range, window: int, value_bytes: int) -> contract.KVInbox:
        limits = pieces.start, pieces.stop, window, value_bytes
        return _RemoteInbox(self._side, *self._side.ask("open_inbox", self._number, lease, *limits))

    def open_outbox(self, lease: str, address: bytes, *, window: int, value_bytes: int) -> contract.KVOutbox:
        return _RemoteOutbox(
            self._side, self._side.ask("open_outbox", self._number, lease, address, window, value_bytes)
        )

    def close(self) -> None:
        for method in ("close", "close", "forget") if self._number else ():  # closing is idempotent
            self._side.ask(method, self._number)
        self._number = 0


class _RemoteInbox(contract.KVInbox):
    def __init__(self, side: RemoteProcess, number: int, address: bytes) -> None:
        self._side, self._number, self.address = side, number, address

    def take(self, index: int, reference: bytes, frames: Sequence[contract.Bytes]) -> contract.Bytes:
        value: bytes = self._side.ask("take", self._number, index, reference, [bytes(frame) for frame in frames])
        return value

    def done(self, index: int, reference: bytes) -> None:
        self._side.ask("done", self._number, index, reference)

    def close(self) -> None:
        self._side.ask("close", self._number)


class _RemoteOutbox(contract.KVOutbox):
    def __init__(self, side: RemoteProcess, number: int) -> None:
        self._side, self._number = side, number

    def put(self, index: int, parts: Sequence[contract.Bytes]) -> contract.PutResult:
        reference, frames = self._side.ask("put", self._number, index, [bytes(part) for part in parts])
        return contract.PutResult(reference, tuple(frames))

    def close(self) -> None:
        self._side.ask("close", self._number)
