"""The other process of the kit: it makes calls of its own connectors as it is told, until its input ends."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from fd_core.disagg.connectors.contract import ConnectorError
from fd_core.testing.connectors.far import Answer, Call, Recipe, census, read, write


class _Far:
    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def answer(self, call: Call) -> Answer:
        try:
            return Answer(self._do(call.method, self._made.get(call.target), call.target, *call.arguments))
        except ConnectorError as error:
            return Answer(refused=str(error))
        except Exception as error:  # noqa: BLE001 -- told to the test, which fails
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
                return census()
            case _:
                getattr(target, method)(*arguments)
        return None

    def _keep(self, made: Any) -> int:
        number = max(self._made, default=0) + 1
        self._made[number] = made
        return number


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the connector prints must not mix with the answers
    far = _Far()
    while (encoded := read(sys.stdin.buffer)) is not None:
        write(answers, far.answer(msgspec.msgpack.decode(encoded, type=Call)))


if __name__ == "__main__":
    _main()
