"""The other process of the kit: it makes calls of its own connectors as it is told, until its input ends."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from fd_core.disagg.connectors.contract import ConnectorError
from fd_core.testing.connectors.far_messages import Answer, Call, read, write
from fd_core.testing.connectors.holdings import census
from fd_core.testing.connectors.recipe import make_connector


class _Far:
    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def answer(self, call: Call) -> Answer:
        try:
            return self._do(call)
        except ConnectorError as error:
            return Answer(refused=str(error))
        except Exception as error:  # noqa: BLE001 -- told to the test, which fails
            return Answer(broken=f"{type(error).__name__}: {error}")

    def _do(self, call: Call) -> Answer:
        target: Any = self._made.get(call.target)
        data: bytes = b""
        frames: tuple[bytes, ...] = ()
        match call.method:
            case "make" if call.recipe is not None:
                self._made[call.made] = make_connector(call.recipe)
            case "open_inbox":
                pieces = range(call.first, call.stop)
                inbox = target.open_inbox(call.lease, pieces=pieces, window=call.window, value_bytes=call.value_bytes)
                self._made[call.made], data = inbox, inbox.address
            case "open_outbox":
                self._made[call.made] = target.open_outbox(
                    call.lease, call.address, window=call.window, value_bytes=call.value_bytes
                )
            case "put":
                put = target.put(call.index, call.buffers)
                data, frames = put.reference, tuple(bytes(frame) for frame in put.frames)
            case "take":
                data = bytes(target.take(call.index, call.reference, call.buffers))
            case "done":
                target.done(call.index, call.reference)
            case "close":
                target.close()
            case "forget":
                del self._made[call.target]
            case "census":
                return Answer(census=census())
        return Answer(data, frames)


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the connector prints must not mix with the answers
    far = _Far()
    while (encoded := read(sys.stdin.buffer)) is not None:
        write(answers, far.answer(msgspec.msgpack.decode(encoded, type=Call)))


if __name__ == "__main__":
    _main()
