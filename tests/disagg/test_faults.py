"""Misbehaving networks and workers: no foreign data is accepted, no state leaks, every request is answered."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from fd_core.disagg.messages import AbortLease, Commit, Credit, Heartbeat, KVPiece, Open, Refuse
from fd_core.disagg.wire import Wire
from fd_core.kv.stores.envelope import Envelope
from fd_core.types import PrefillJob
from tests.kv.tiers.scripted import ScriptedCache

from .pair import BLOCK, COMPATIBILITY, PATIENCE, SECRET, Computer, Fetches, Pair, make_receiver, make_sender, pump
from .proxy import Proxy, hostile

ROOT = Path(__file__).parents[2]
LEASE = "ab" * 16
WIRE = Wire(Envelope(SECRET), BLOCK)


# Networks ---------------------------------------------------------------------------------------------------

NETWORKS = {
    "repeats": {"repeat": 0.7},
    "reorders": {"delay": 0.7, "longest": 0.03},
    "repeats and reorders": {"repeat": 0.5, "delay": 0.5, "longest": 0.03},
    "drops": {"drop": 0.1},
    "flips": {"flip": 0.1},
    "everything": {"drop": 0.03, "repeat": 0.2, "delay": 0.4, "flip": 0.03},
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("network", NETWORKS)
def test_bad_network_costs_only_time(network: str, seed: int) -> None:
    chances = NETWORKS[network]
    harmless = not {"drop", "flip"} & set(chances)
    idle_timeout = 10.0 if harmless else 0.4
    with (
        Pair(receiver={"window": 3, "idle_timeout": idle_timeout}, blocks=200) as pair,
        Proxy(pair.peer, hostile(seed, **chances)) as proxy,
    ):
        pair.peer = proxy.address
        numbers = [pair.fetch(1 + 3 * number, salt=f"s{number}") for number in range(12)]
        outcomes = [fetched.outcome for fetched in pair.answers(numbers)]
        if harmless:
            assert set(outcomes) == {"transferred"}
        else:
            assert set(outcomes) <= {"transferred", "expired", "damaged", "lost"}
        pair.idle()
        pair.until(lambda: len(pair.prefill.free) == len(pair.decode.free) == 200)


def test_corrupt_value_damages_only_its_prompt() -> None:
    def judge(direction, parts):
        if direction == "down" and len(parts) > 1 and not flipped:
            flipped.append(1)
            parts[-1] = bytes([parts[-1][0] ^ 1]) + parts[-1][1:]
        return [(0.0, parts)]

    flipped: list[int] = []
    with Pair() as pair, Proxy(pair.peer, judge) as proxy:
        pair.peer = proxy.address
        assert pair.answer(pair.fetch(12)).outcome == "damaged"
        assert pair.answer(pair.fetch(12)).outcome == "transferred"
        pair.idle()


def test_lost_open_is_retransmitted() -> None:
    def judge(direction, parts):
        return [] if len(proxy.seen) == 1 else [(0.0, parts)]

    with Pair(receiver={"idle_timeout": 2.0}) as pair, Proxy(pair.peer) as proxy:
        proxy.judge = judge
        pair.peer = proxy.address
        assert pair.answer(pair.fetch(12)).outcome == "transferred"
        pair.idle()


def test_late_duplicate_open_is_ignored() -> None:
    def judge(direction, parts):
        if direction == "up" and isinstance(WIRE.open_from_decode(parts[0]), Open):
            return [(0.0, parts), (0.5, parts)]
        return [(0.0, parts)]

    with Pair() as pair, Proxy(pair.peer, judge) as proxy:
        pair.peer = proxy.address
        assert pair.answer(pair.fetch(12)).outcome == "transferred"
        pair.until(lambda: pair.sender.stats().late_messages > 0)
        pair.idle()
        assert len(pair.prefill.arrived) == 1


@pytest.mark.law("6.2")
def test_late_pieces_are_answered_with_abort() -> None:
    def judge(direction, parts):
        late = direction == "down" and isinstance(WIRE.open_from_prefill(parts[0]), KVPiece)
        return [(0.6 if late else 0.0, parts)]

    with Pair() as pair, Proxy(pair.peer, judge) as proxy:
        pair.peer = proxy.address
        number = pair.fetch(12)
        pair.until(lambda: pair.prefill_cache.exported == 3)
        pair.decode.cancel(number)
        assert pair.answer(number).outcome == "aborted"
        pair.until(lambda: pair.receiver.stats().late_messages >= 3)
        pair.idle()


# Unauthenticated peers --------------------------------------------------------------------------------------


@contextlib.contextmanager
def dealer(port: int) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://127.0.0.1:{port}")
        yield socket


def receive(socket: zmq.Socket, seconds: float = PATIENCE) -> object:
    return WIRE.open_from_prefill(socket.recv_multipart()[0]) if socket.poll(int(seconds * 1000)) else None


def test_unauthenticated_peers_get_no_reply() -> None:
    with Pair() as pair, dealer(pair.sender.port) as stranger:
        frames = [
            [b""],
            [b"", b""],
            [b"x" * 1000],
            [b"a"] * 1000,
            [b"".join(Envelope(bytes(32)).seal(b"fd_core/decode", b"x"))],
            [WIRE.seal_from_prefill(Heartbeat(LEASE))],
            [WIRE.seal_from_decode(Heartbeat(LEASE)), b"more"],
        ]
        for parts in frames:
            stranger.send_multipart(parts)
        pair.until(lambda: pair.sender.stats().dropped_frames == len(frames))
        assert not stranger.poll(200)
        assert pair.answer(pair.fetch(8)).outcome == "transferred"


def test_oversized_frame_closes_the_connection() -> None:
    with Pair() as pair, dealer(pair.sender.port) as stranger:
        stranger.send(bytes(64 * 2**20))
        assert pair.answer(pair.fetch(8)).outcome == "transferred"
        assert not stranger.poll(100)
        assert pair.sender.stats().dropped_frames == 0


def test_authenticated_peers_get_an_error_reason() -> None:
    with Pair() as pair, dealer(pair.sender.port) as socket:
        socket.send(WIRE.seal_from_decode(Credit(LEASE, 3)))
        assert receive(socket) == AbortLease(LEASE, "the prefill worker has no such lease")
        socket.send(WIRE.seal_from_decode(AbortLease(LEASE)))
        opening = Open(PrefillJob(bytes(8), lease=LEASE), COMPATIBILITY, 4, 5.0, "frames", b"")
        odd = {
            "the window is not": msgspec.structs.replace(opening, window=-1),
            "the idle timeout is not": msgspec.structs.replace(opening, idle_timeout=float("nan")),
            "the job requests no KV": msgspec.structs.replace(opening, job=PrefillJob(bytes(8), 5, lease=LEASE)),
        }
        for reason, message in odd.items():
            socket.send(b"".join(Envelope(SECRET).seal(b"fd_core/decode", msgspec.msgpack.encode(message))))
            assert getattr(receive(socket), "reason", "").startswith(reason)
        assert pair.sender.stats().refused == {"malformed": 3}


def test_messages_for_ended_lease_are_answered_except_aborts() -> None:
    cache = ScriptedCache()
    receiver = make_receiver(cache)
    decode = Fetches(receiver, cache)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as prefill:
        prefill.linger = 0
        decode.fetch(f"127.0.0.1:{prefill.bind_to_random_port('tcp://127.0.0.1')}", 8)
        try:
            route, frame = prefill.recv_multipart()
            opening = WIRE.open_from_decode(frame)
            for message in (
                AbortLease(LEASE),
                Refuse(LEASE, "no"),
                KVPiece(LEASE, 0, bytes(16)),
                Commit(LEASE, 8, bytes(16)),
            ):
                prefill.send_multipart([route, WIRE.seal_from_prefill(message)])
            answers = [WIRE.open_from_decode(prefill.recv_multipart()[1]) for _ in range(2)]
            assert answers == [AbortLease(LEASE, "the lease is over")] * 2
            assert receiver.stats().late_messages == 4
            prefill.send_multipart([route, b"garbage"])
            prefill.send_multipart([route, WIRE.seal_from_prefill(Refuse(opening.lease, "not today"))])
            pump(lambda: bool(decode.fetched), decode)
            assert [(one.outcome, one.reason) for one in decode.fetched.values()] == [("refused", "not today")]
            assert receiver.stats().dropped_frames == 1
        finally:
            receiver.close()


def test_decode_side_silent_after_open_times_out() -> None:
    with Pair() as pair:
        with dealer(pair.sender.port) as socket:
            socket.send(
                WIRE.seal_from_decode(
                    Open(PrefillJob(bytes(4 * 40), lease=LEASE), COMPATIBILITY, 1, 0.3, "frames", b"")
                )
            )
            pair.until(lambda: pair.sender.stats().ended == {"expired": 1})
            pair.until(lambda: not pair.prefill.pinned)
        assert len(pair.prefill.free) == 64


def test_decode_side_disconnect_frees_the_lease() -> None:
    with Pair() as pair:
        with dealer(pair.sender.port) as socket:
            socket.send(
                WIRE.seal_from_decode(
                    Open(PrefillJob(bytes(4 * 40), lease=LEASE), COMPATIBILITY, 1, 8.0, "frames", b"")
                )
            )
            pair.until(lambda: len(pair.prefill.pinned) > 3)
        pair.until(lambda: not pair.prefill.pinned)
        assert pair.sender.stats().ended == {"failed": 1}


# Processes --------------------------------------------------------------------------------------------------


class Other:
    """The other side in a separate process."""

    def __init__(self, role: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.disagg.other", role, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        self.out = self.process.stdout

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self.out.close()

    def read_line(self) -> str:
        return self.out.readline().strip()

    def stop(self, how: signal.Signals) -> None:
        os.kill(self.process.pid, how)


@pytest.mark.parametrize(
    "how, outcome", [(signal.SIGKILL, "lost"), (signal.SIGSTOP, "expired")], ids=["killed", "stopped"]
)
def test_prefill_worker_lost_mid_transfer(how: signal.Signals, outcome: str) -> None:
    idle_timeout = 30.0 if how is signal.SIGKILL else 2.0
    cache = ScriptedCache(200)
    receiver = make_receiver(cache, idle_timeout=idle_timeout, window=2)
    decode = Fetches(receiver, cache)
    try:
        with Other("prefill", 0.01) as other:
            peer = f"127.0.0.1:{other.read_line()}"
            quick = decode.fetch(peer, 8)
            pump(lambda: quick in decode.fetched, decode)
            assert decode.fetched[quick].outcome == "transferred"
            before = receiver.stats().pieces
            goes_on, copies = threading.Event(), itertools.count(1)
            cache.between = lambda: next(copies) > 6 and goes_on.wait(PATIENCE) and None
            numbers = [decode.fetch(peer, 4 * 60, salt=f"{number}") for number in range(3)]
            pump(lambda: receiver.stats().pieces > before + 5, decode)
            other.stop(how)
            goes_on.set()
            pump(lambda: len(decode.fetched) == 4, decode)
            assert {decode.fetched[number].outcome for number in numbers} == {outcome}
            if how is signal.SIGSTOP:
                other.stop(signal.SIGCONT)
                again = decode.fetch(peer, 8)
                pump(lambda: again in decode.fetched, decode)
                assert decode.fetched[again].outcome == "transferred"
            assert len(decode.free) == 200
            assert cache.broken_rules == []
    finally:
        receiver.close()


@pytest.mark.parametrize(
    "how, idle_timeout, within", [(signal.SIGKILL, 4.0, 4.0), (signal.SIGSTOP, 0.5, 6.0)], ids=["killed", "stopped"]
)
@pytest.mark.timing
def test_decode_worker_lost_mid_transfer(how: signal.Signals, idle_timeout: float, within: float) -> None:
    cache = ScriptedCache(200)
    sender = make_sender(cache)
    prefill = Computer(sender, cache)
    try:
        with Other("decode", sender.port, idle_timeout) as other:
            pump(lambda: cache.exported > 10, prefill)
            other.stop(how)
            assert sender.stats().open_leases
            began = time.monotonic()
            pump(lambda: not (sender.stats().open_leases or prefill.pinned), prefill)
            assert time.monotonic() - began < within
            assert len(prefill.free) == 200
            assert cache.broken_rules == []
            assert not prefill.jobs
    finally:
        sender.close()
