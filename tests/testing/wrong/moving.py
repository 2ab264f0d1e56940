"""Faults in connectors, each with the case of the kit that detects it."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from fd_core.disagg.connectors.contract import ConnectorError, PutResult
from fd_core.disagg.connectors.kv_store import KVStoreConnector
from fd_core.disagg.connectors.shared_memory import SharedMemoryConnector
from fd_core.disagg.connectors.tcp import TCPConnector

WRONG = {}
"""By class: the case or the test that detects it, or the server of a day, and the right class."""


def found_by(case):
    """Name the case, or the server of a day, that detects a connector."""

    def register(cls):
        WRONG[cls] = case, next(base for base in cls.__mro__ if not issubclass(base, Changed))
        return cls

    return register


class Changed:
    """Wraps the ends of a connector; a subclass replaces their methods."""

    def open_inbox(self, lease, **limits):
        whole = super().open_inbox(self.lease(lease), **limits)
        end = SimpleNamespace(address=whole.address, take=whole.take, done=whole.done, close=whole.close)
        self.change_inbox(end, whole)
        return end

    def open_outbox(self, lease, address, **limits):
        whole = super().open_outbox(self.lease(lease), address, **limits)
        end = SimpleNamespace(put=whole.put, close=whole.close)
        self.change_outbox(end, whole)
        return end

    def lease(self, lease):
        return lease

    def change_inbox(self, end, whole):
        pass

    def change_outbox(self, end, whole):
        pass


@found_by("plain")
class SendsTheFirstPart(Changed, TCPConnector):
    def change_outbox(self, end, whole):
        end.put = lambda index, parts: whole.put(index, parts[:1])


@found_by("moves=a window at a time")
class HasOneBuffer(Changed, SharedMemoryConnector):
    def change_outbox(self, end, whole):
        whole._layout = whole._layout._replace(window=1)


@found_by("plain")
class BelievesReferences(Changed, SharedMemoryConnector):
    def change_inbox(self, end, whole):
        end.take = lambda index, reference, frames: whole._segment.bytes[reference[0] : reference[1]]


@found_by("take=twice")
class FreesABufferWhenItIsTaken(Changed, SharedMemoryConnector):
    def change_inbox(self, end, whole):
        end.take = lambda *piece: (whole.take(*piece), whole.done(*piece[:2]))[0]


@found_by("leases=2,lease=last letter")
class CutsNamesOfLeases(Changed, KVStoreConnector):
    def lease(self, lease):
        return lease[:16]


@found_by("leases=2,lease=first letter")
class NamesLeasesByTheirEnd(Changed, KVStoreConnector):
    def lease(self, lease):
        return lease[-24:]


@found_by("pieces=129,window=257,moves=a window at a time")
class KeepsPlacesIn6Bits(Changed, SharedMemoryConnector):
    def change_inbox(self, end, whole):
        def take(index, reference, frames):
            place, length = struct.unpack("<II", reference)
            return whole.take(index, struct.pack("<II", place & 0x3F, length), frames)

        end.take = take


@found_by("first=2147483646")
class KeepsIndicesIn32Bits(Changed, TCPConnector):
    def change_outbox(self, end, whole):
        end.put = lambda index, parts: (struct.pack("<i", index), whole.put(index, parts))[1]


@found_by("first=65534")
class KeepsIndicesIn16Bits(Changed, TCPConnector):
    def change_inbox(self, end, whole):
        end.take = lambda index, *piece: whole.take(index, *piece) if index < 65_536 else b""


@found_by("large blocks")
class SendsFromARing(Changed, TCPConnector):
    """Copies pieces into a ring of at most 32 MiB, also where more may be in flight."""

    def open_outbox(self, lease, address, **limits):
        self.limits = limits
        return super().open_outbox(lease, address, **limits)

    def change_outbox(self, end, whole):
        size, slots = self.limits["value_bytes"], self.limits["window"]
        slots = max(1, min(slots, (32 << 20) // size))
        ring, begins = bytearray(slots * size), itertools.cycle(range(0, slots * size, size))

        def put(index, parts):
            reference, frames = whole.put(index, parts)
            begin, value = next(begins), b"".join(frames)
            ring[begin : begin + len(value)] = value
            return PutResult(reference, (memoryview(ring)[begin : begin + len(value)],))

        end.put = put


@found_by("value_bytes=1048577,pieces=2")
class CutsLargeValues(Changed, TCPConnector):
    def change_inbox(self, end, whole):
        end.take = lambda *piece: bytes(whole.take(*piece))[: 1 << 20]


@found_by("sizes=empty")
class TreatsEmptyValuesAsMissing(Changed, TCPConnector):
    def change_inbox(self, end, whole):
        def take(*piece):
            value = whole.take(*piece)
            if not len(value):
                raise ConnectorError("a piece is missing")
            return value

        end.take = take


@found_by("parts=65")
class SendsAtMost64Parts(Changed, TCPConnector):
    def change_outbox(self, end, whole):
        end.put = lambda index, parts: whole.put(index, parts[:64])


@found_by("content=like others")
class DecompressesValues(Changed, TCPConnector):
    def change_inbox(self, end, whole):
        def take(*piece):
            value = bytes(whole.take(*piece))
            return b"" if value[:3] == b"\x1f\x8b\x08" else value

        end.take = take


@found_by("thread=true")
class ServesOneThread(Changed, TCPConnector):
    def __init__(self, settings):
        super().__init__(settings)
        self.owner = threading.get_ident()

    def change_inbox(self, end, whole):
        def take(*piece):
            if threading.get_ident() != self.owner:
                raise ConnectorError("another thread")
            return whole.take(*piece)

        end.take = take


@found_by("peer=none,moves=a window at a time,sent=when it is taken")
class ReusesItsFrame(Changed, TCPConnector):
    def change_outbox(self, end, whole):
        frame = bytearray(1 << 20)

        def put(index, parts):
            value = b"".join(whole.put(index, parts).frames)
            frame[: len(value)] = value
            return PutResult(b"", (memoryview(frame)[: len(value)],))

        end.put = put


@found_by("peer=none,buffer=bytearray")
class SendsPartsAfterPut(Changed, KVStoreConnector):
    def change_outbox(self, end, whole):
        waiting = []

        def put(index, parts):
            waiting.append(threading.Timer(0.01, whole.put, (index, parts)))
            waiting[-1].start()
            return PutResult(b"")

        end.put, end.close = put, lambda: ([each.join() for each in waiting], whole.close())

    def change_inbox(self, end, whole):
        def take(*piece):
            time.sleep(0.05)
            return whole.take(*piece)

        end.take = take


@found_by("before=a lease that ends later")
class EndsAllLeasesWithOne(Changed, TCPConnector):
    """The shared memory is made for the first lease and released with any."""

    shared = None

    def change_inbox(self, end, whole):
        self.shared = self.shared or object()

        def take(*piece):
            if self.shared is None:
                raise ConnectorError("the memory is gone")
            return whole.take(*piece)

        end.take, end.close = take, lambda: (whole.close(), setattr(self, "shared", None))


@found_by("peer=none")
class ClosesOnce(Changed, TCPConnector):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True


@found_by("peer=none,before=a refused value")
class QuotesAValue(Changed, TCPConnector):
    def change_outbox(self, end, whole):
        def put(index, parts):
            try:
                return whole.put(index, parts)
            except ConnectorError as error:
                raise ConnectorError(f"{error}: {bytes(parts[-1])[:40]!r}") from None

        end.put = put


@found_by("peer=none,closed=inbox first")
class WaitsForTheOtherSide(Changed, TCPConnector):
    closed = {}  # noqa: RUF012 - as a message of the other side

    def open_inbox(self, lease, **limits):
        end = super().open_inbox(lease, **limits)
        close, over = end.close, self.closed.setdefault(lease, threading.Event())
        end.close = lambda: (over.wait(3 * self.settings.timeout), over.set(), close())
        return end

    def open_outbox(self, lease, address, **limits):
        end = super().open_outbox(lease, address, **limits)
        close = end.close
        end.close = lambda: (self.closed.setdefault(lease, threading.Event()).set(), close())
        return end


@found_by("before=the same lease")
class KeepsTheLimitsOfALease(Changed, TCPConnector):
    """A lease has the limits of an earlier one of its name."""

    limits = {}  # noqa: RUF012 - that is the fault

    def open_inbox(self, lease, **limits):
        return super().open_inbox(lease, **self.limits.setdefault((id(self), lease), limits))


@found_by("before=a transfer,moves=a window at a time")
class PoolsBuffersByTheirSize(Changed, TCPConnector):
    """The buffers of a lease that is over serve the next one with values of that size, whatever its window."""

    def open_inbox(self, lease, *, window, **limits):
        buffers, taken = self.__dict__.setdefault("pool", {}).pop(limits["value_bytes"], window), set()
        end = super().open_inbox(lease, window=window, **limits)
        take, close = end.take, end.close

        def take_into_a_buffer(index, *piece):
            if len(taken | {index}) > buffers:
                raise ConnectorError("no buffer is free")
            taken.add(index)
            return take(index, *piece)

        end.take, end.done = take_into_a_buffer, lambda index, _: taken.discard(index)
        end.close = lambda: (close(), self.pool.update({limits["value_bytes"]: buffers}))
        return end


@found_by("before=four aborts,peer=none")
class ClosesItsDescriptorAgain(Changed, SharedMemoryConnector):
    """A second close ends the lease that has the number of the descriptor by then."""

    def change_inbox(self, end, whole):
        descriptor = whole._segment._descriptor

        def close():
            with suppress(OSError):
                if whole._segment is None and "memfd" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
                    os.close(descriptor)
            whole.close()

        end.close = close


@found_by("before=another connector,peer=none")
class NumbersInboxesByConnector(Changed, TCPConnector):
    """The table of inboxes is one of the process, their numbers are those of a connector."""

    inboxes = {}  # noqa: RUF012 - that is the fault

    def change_inbox(self, end, whole):
        self.number = self.__dict__.get("number", 0) + 1
        end.address, values = b"%d" % self.number, {}
        self.inboxes[self.number] = values
        end.take = lambda index, *_: whole.take(index, b"", [values[index]])

    def open_outbox(self, lease, address, **limits):
        number, end = int(address), super().open_outbox(lease, b"", **limits)
        put = end.put

        def put_there(index, parts):
            self.inboxes[number][index] = b"".join(put(index, parts).frames)
            return PutResult(b"")

        end.put = put_there
        return end


@found_by("before=another connector that ends later")
class ClosesTheEndsOfOthers(Changed, SharedMemoryConnector):
    """The list of open ends, which `close` closes, is one of the class."""

    ends = []  # noqa: RUF012 - that is the fault

    def change_inbox(self, end, whole):
        self.ends.append(whole)

    def close(self):
        while self.ends:
            self.ends.pop().close()
        super().close()


@found_by("before=four aborts,peer=none,sent=when it is taken")
class ReleasesFramesWhenItCloses(Changed, TCPConnector):
    def change_outbox(self, end, whole):
        sent = []

        def put(index, parts):
            frames = tuple(map(memoryview, whole.put(index, parts).frames))
            sent.extend(frames)
            return PutResult(b"", frames)

        def close():
            whole.close()
            for frame in sent:
                frame.release()

        end.put, end.close = put, close


@found_by("moves=a window at a time,take=twice")
class UsesBuffersInTurn(Changed, TCPConnector):
    """Values are copied into a ring of buffers, although pieces are done in any order."""

    def change_inbox(self, end, whole):
        ring, turns = [bytearray() for _ in range(4)], itertools.count()

        def take(index, reference, frames):
            buffer = ring[next(turns) % len(ring)]
            buffer[:] = whole.take(index, reference, frames)
            return buffer

        end.take = take


@found_by("leases=2,opened=inboxes first,peer=none")
class HasTheLimitsOfTheLatestLease(Changed, TCPConnector):
    """A connector has one buffer for received values, of the size of the latest lease."""

    def open_inbox(self, lease, *, value_bytes, **limits):
        self.room = value_bytes
        return super().open_inbox(lease, value_bytes=value_bytes, **limits)

    def change_inbox(self, end, whole):
        def take(*piece):
            value = whole.take(*piece)
            if len(value) > self.room:
                raise ConnectorError("a value is too long")
            return value

        end.take = take


@found_by("value_bytes=65537,peer=none")
class SendsSmallFrames(Changed, TCPConnector):
    """Cuts values into more frames than a message may have."""

    def change_outbox(self, end, whole):
        def put(index, parts):
            value = b"".join(whole.put(index, parts).frames)
            return PutResult(b"", tuple(value[at : at + 4096] for at in range(0, len(value), 4096)) or (b"",))

        end.put = put


@found_by("before=a refused value,peer=none")
class SendsValuesOfAnyLength(Changed, TCPConnector):
    def change_outbox(self, end, whole):
        whole._value_bytes = 1 << 40


@found_by("before=four aborts,peer=none")
class ReturnsPiecesAfterClose(Changed, TCPConnector):
    def change_inbox(self, end, whole):
        end.close = lambda: None


@found_by("before=four aborts,peer=none")
class AcceptsPiecesAfterClose(Changed, TCPConnector):
    def change_outbox(self, end, whole):
        end.close = lambda: None


@found_by("before=a refused value,peer=none")
class EndsALeaseAfterARefusedValue(Changed, TCPConnector):
    """A value that is too long is no failure of the lease."""

    def change_outbox(self, end, whole):
        def put(index, parts):
            try:
                return whole.put(index, parts)
            except ConnectorError:
                whole.close()
                raise

        end.put = put


@found_by("before=a refused value,peer=none")
class TakesValuesOfAnyLength(Changed, TCPConnector):
    def change_inbox(self, end, whole):
        end.take = lambda index, reference, frames: b"".join(frames)


@found_by("before=another connector that begins later")
class RemovesWhatIsThere(Changed, SharedMemoryConnector):
    """Takes the memory of open leases, also of another engine, for that of processes that were killed."""

    there: ClassVar = []

    def __init__(self, settings):
        super().__init__(settings)
        while self.there:
            self.there.pop().close()

    def change_inbox(self, end, whole):
        self.there.append(whole)


@found_by("age=3600,peer=none")
class ExpiresByTheClock(Changed, TCPConnector):
    """A lease of a prompt that waits for long is taken for that of a worker that was killed."""

    def change_inbox(self, end, whole):
        until = time.time() + 480

        def take(*piece):
            if time.time() > until:
                raise ConnectorError("the lease has expired")
            return whole.take(*piece)

        end.take = take


class _WithPeers(Changed, TCPConnector):
    """Names the connectors of both sides in each reference."""

    def __init__(self, settings):
        super().__init__(settings)
        self.name_of_this, self.peer = os.urandom(8), None

    def change_inbox(self, end, whole):
        end.address = self.name_of_this
        end.take = lambda index, reference, frames: whole.take(index, self.checked(reference), frames)
        end.done = lambda index, reference: whole.done(index, self.checked(reference))

    def open_outbox(self, lease, address, **limits):
        end = super().open_outbox(lease, b"", **limits)
        put, peer = end.put, self.peer_of(address)

        def put_to_peer(index, parts):
            reference, frames = put(index, parts)
            return PutResult(peer + self.name_of_this + reference, frames)

        end.put = put_to_peer
        return end

    def peer_of(self, address):
        return address

    def checked(self, reference):
        if reference[:8] != self.name_of_this:
            raise ConnectorError("the piece is of another inbox")
        return reference[16:]


@found_by("before=another decode side")
class SendsToItsFirstPeer(_WithPeers):
    """Connects to one decode side, and sends the leases of others there as well."""

    def peer_of(self, address):
        self.peer = self.peer or address
        return self.peer


@found_by("before=another prefill side")
class ReceivesFromItsFirstPeer(_WithPeers):
    """Accepts one connection, and refuses what another prefill side sends."""

    def checked(self, reference):
        self.peer = self.peer or reference[8:16]
        if reference[8:16] != self.peer:
            raise ConnectorError("the piece is of another prefill side")
        return super().checked(reference)


@found_by("test_nothing_is_held_of_leases_that_are_over")
class KeepsRefusedLeases(Changed, TCPConnector):
    """A lease is in the table of the connector before its address is checked."""

    def open_outbox(self, lease, address, **limits):
        leases = self.__dict__.setdefault("leases", {})
        leases[lease] = limits
        end = super().open_outbox(lease, address, **limits)
        close = end.close
        end.close = lambda: (close(), leases.pop(lease, None))
        return end


class Greets(Changed, TCPConnector):
    """Intact: leases are greeted on a socket, each in a thread of its own."""

    listener = None

    def open_inbox(self, lease, **limits):
        if self.listener is None:
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.thread = threading.Thread(target=self.accept, daemon=True)
            self.thread.start()
        end = super().open_inbox(lease, **limits)
        end.address = b"%d" % self.listener.getsockname()[1]
        return end

    def accept(self):
        with suppress(OSError):
            while True:
                self.accepted(self.listener.accept()[0])

    def accepted(self, connection):
        threading.Thread(target=self.greet, args=(connection,), daemon=True).start()

    def greet(self, connection):
        with connection, suppress(OSError):
            connection.sendall(b"+" * (len(connection.recv(32)) == 32))

    def open_outbox(self, lease, address, **limits):
        with socket.create_connection(("127.0.0.1", int(address)), self.settings.timeout) as connection:
            connection.sendall(lease.encode())
            if connection.recv(1) != b"+":
                raise ConnectorError("the other side does not know the lease")
        return super().open_outbox(lease, b"", **limits)

    def close(self):
        super().close()
        if self.listener is not None:
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
            self.thread.join()
            self.listener = None


@found_by("before=strangers connect,peer=none")
class GreetsOneAfterAnother(Greets):
    """Reads in the thread that accepts connections: one that sends nothing stops all leases."""

    def accepted(self, connection):
        self.greet(connection)


@found_by("test_calls_of_a_process_at_a_limit_fail_one_lease_at_most[descriptors]")
class PassesOnErrorsOfTheSystem(Changed, TCPConnector):
    """Notes each piece in a file, and expects that it can be opened."""

    def change_outbox(self, end, whole):
        def put(index, parts):
            with Path(os.devnull).open("wb") as file:
                file.write(b"%d" % index)
            return whole.put(index, parts)

        end.put = put
