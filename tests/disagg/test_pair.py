"""Receiver and sender over loopback in one process: successful transfers and every kind of failure."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from fd_core.disagg.connectors.contract import ConnectorError, PutResult
from fd_core.disagg.decode import connections
from fd_core.disagg.decode.connections import Endpoint
from fd_core.disagg.prefill import sender as sender_module
from fd_core.effects.operations import Cancel, Completion, Fetch, Fetched, PrefillJobArrived, Send, Sent
from fd_core.errors import ConfigError
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.envelope import Envelope
from fd_core.ops.contract import KVCache, KVShape
from fd_core.ops.numpy.ops import NumpyKVCache
from fd_core.types import PrefillJob
from tests.kv.tiers.scripted import ScriptedCache
from tests.server.processes import free_port

from .pair import (
    COMPATIBILITY,
    PATIENCE,
    SECRET,
    SIZE,
    Fetches,
    FrameInbox,
    FrameOutbox,
    Frames,
    Pair,
    kv,
    make_receiver,
    make_sender,
    pump,
)


class HeldCopy:
    """Blocks the copies of a cache until released."""

    def __init__(self, cache: ScriptedCache) -> None:
        self.begun, self._gate = threading.Event(), threading.Event()
        cache.between = self._hold

    def _hold(self) -> None:
        self.begun.set()
        self._gate.wait(PATIENCE)

    def resume(self) -> None:
        self._gate.set()


# Transfers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 4, 5, 37])
def test_prompt_is_transferred_block_by_block(tokens: int) -> None:
    with Pair() as pair:
        fetched = pair.answer(pair.fetch(tokens))
        assert (fetched.outcome, fetched.reason) == ("transferred", "")
        assert fetched.cached == min(3, tokens)
        assert fetched.seconds > 0
        pair.idle()
        count = -(-tokens // SIZE)
        assert pair.receiver.stats().pieces == pair.sender.stats().pieces == count
        assert pair.receiver.stats().outcomes == {"transferred": 1}
        assert pair.sender.stats().ended == {"confirmed": 1}
        assert pair.sender.stats().bytes == pair.receiver.stats().bytes > 0
        assert pair.sender.stats().seconds > 0
        assert pair.connector.log.count("close inbox") == pair.connector.log.count("close outbox") == 1


def test_order_describes_wanted_blocks() -> None:
    with Pair() as pair:
        pair.answer(pair.fetch(21, first=2, salt="pepper", priority=-3, tenant="t"))
        (job,) = pair.prefill.arrived
        assert job.token_ids.tolist() == list(range(21))
        assert job.token_ids.dtype == np.int32
        assert (job.held_blocks, job.cache_salt, job.priority, job.tenant) == (2, "pepper", -3, "t")
        assert pair.receiver.stats().pieces == 4


@pytest.mark.parametrize(
    ("named", "seen"), [("trace-7.0.0", "trace-7.0.0"), ("", "-"), ("a\nb", "a\\x0ab"), ("x" * 9999, "x" * 256)]
)
def test_prefill_log_names_the_request(caplog: pytest.LogCaptureFixture, named: str, seen: str) -> None:
    caplog.set_level(logging.INFO, "fd_core.access")
    with Pair() as pair:
        assert pair.answer(pair.fetch(9, request_id=named)).outcome == "transferred"
        pair.idle()
    (line,) = [each for each in caplog.records if each.name == "fd_core.access"]
    assert line.getMessage().startswith("prefill confirmed ") and line.getMessage().endswith(f"in=9 id={seen}")
    assert line.fields["request_id"] == seen  # type: ignore[attr-defined]


def test_blocks_held_by_decode_side_are_not_requested() -> None:
    with Pair() as pair:
        assert pair.answer(pair.fetch(8, first=2)).outcome == "held"
        assert pair.prefill.arrived == []


def test_unwanted_blocks_are_acknowledged_immediately() -> None:
    """A prefill engine may send from the first block on, regardless of the decode side's prefix."""
    with Pair() as pair:
        number = pair.fetch(12, first=2)
        pair.until(lambda: pair.sender.stats().open_leases == 1)
        pair.prefill.computes = False
        pair.until(lambda: bool(pair.prefill.jobs))
        (job,) = pair.prefill.jobs.values()
        job.at = 0
        pair.prefill.compute(job)
        pair.until(lambda: not pair.prefill.pinned)
        assert number not in pair.decode.fetched
        pair.prefill.computes = True
        assert pair.answer(number).outcome == "transferred"


def test_many_leases_share_a_small_window() -> None:
    with Pair(receiver={"window": 2, "idle_timeout": 30.0}, blocks=900) as pair:
        numbers = [pair.fetch(1 + number % 16, salt=f"s{number}") for number in range(200)]
        assert {fetched.outcome for fetched in pair.answers(numbers)} == {"transferred"}
        pair.idle()
        assert pair.sender.stats().ended == {"confirmed": 200}
        assert len(pair.prefill.free) == len(pair.decode.free) == 900


def test_several_prefill_workers_in_parallel() -> None:
    with Pair() as one, Pair() as two:
        numbers = [one.decode.fetch(peer, 9, salt=peer) for peer in (one.peer, two.peer) * 3]
        pump(lambda: len(one.decode.fetched) == 6, one.decode, one.prefill, two.prefill)
        assert {one.decode.fetched[number].outcome for number in numbers} == {"transferred"}
        assert one.receiver.stats().peers == 2
        assert len(two.prefill.arrived) == 3


def test_all_addresses_of_a_host_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a quarter of the silence timeout, after which a lease would retransmit its first message by itself."""
    with Pair(receiver={"idle_timeout": 400.0}) as pair:
        endpoints = [(f"tcp://127.0.0.1:{port}", False) for port in (free_port(), free_port(), pair.sender.port)]
        lookups = []

        def look_up(host: str, port: int, found: Callable[[list[Endpoint]], object]) -> list[Endpoint]:
            lookups.append((host, port))
            threading.Timer(0.05, found, [endpoints]).start()
            return []

        monkeypatch.setattr(connections, "look_up", look_up)
        numbers = [pair.decode.fetch("some.name:77", 9, salt=salt) for salt in "ab"]
        assert {fetched.outcome for fetched in pair.answers(numbers)} == {"transferred"}
        assert lookups == [("some.name", 77)]


def test_local_host_name_is_resolved() -> None:
    with Pair() as pair:
        number = pair.decode.fetch(f"localhost:{pair.sender.port}", 9)
        assert pair.answer(number).outcome == "transferred"


def test_ipv6_address() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        with Pair(sender={"host": "::1"}) as pair:
            pair.peer = f"[::1]:{pair.sender.port}"
            assert pair.answer(pair.fetch(9)).outcome == "transferred"
    except ConfigError:
        pytest.skip("no IPv6 on this machine")


@pytest.mark.parametrize("pack", ["numpy", "torch float32", "torch bfloat16"])
def test_real_caches_are_bitwise_equal_after_transfer(pack: str) -> None:
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4)
    caches: list[KVCache]
    if pack == "numpy":
        caches = [NumpyKVCache(shape, 12) for _ in range(2)]
    else:
        torch = pytest.importorskip("torch")
        from fd_core.ops.torch.attention import TorchKVCache

        caches = [TorchKVCache(shape, 12, getattr(torch, pack.split()[1]), "cpu") for _ in range(2)]
    dtype = "bfloat16" if "bfloat16" in pack else "float32"
    block = BlockFormat.of(shape, dtype)
    every = np.arange(12, dtype=np.int32)
    noise = np.random.default_rng(7).standard_normal((12, *block.shape)).astype(np.float32)
    caches[0].import_blocks(every, noise if dtype == "float32" else (noise.view(np.uint32) >> 16).astype(np.uint16))
    compatibility = msgspec.structs.replace(COMPATIBILITY, dtype=dtype, num_layers=3)
    sender = make_sender(caches[0], block=block, compatibility=compatibility)
    receiver = make_receiver(caches[1], block=block, compatibility=compatibility)
    there, here = np.array([3, 1, 11, 0, 5], np.int32), np.array([9, 2, 4, 7, 8], np.int32)
    try:
        receiver.perform([Fetch(1, f"127.0.0.1:{sender.port}", PrefillJob(np.arange(18, dtype="<i4").tobytes()), here)])
        fetched: list[Completion] = []
        sent: list[Completion] = []
        until = time.monotonic() + PATIENCE
        while not fetched and time.monotonic() < until:
            for arrived in sender.completions():
                if isinstance(arrived, PrefillJobArrived):
                    lease = arrived.job.lease
                    sender.perform([Send(7, lease, 0, there[:3]), Send(8, lease, 3, there[3:], tokens=18)])
                else:
                    sent.append(arrived)
            receiver.wait(0.01)
            fetched += receiver.completions()
        assert [one.outcome for one in fetched if isinstance(one, Fetched)] == ["transferred"]
        sent += sender.completions()
        assert sorted(one.operation for one in sent if isinstance(one, Sent)) == [7, 8]
    finally:
        receiver.close()
        sender.close()
    assert caches[1].export_blocks(here).tobytes() == caches[0].export_blocks(there).tobytes()
    others = np.setdiff1d(every, here).astype(np.int32)
    assert not caches[1].export_blocks(others).any()


# Pace -------------------------------------------------------------------------------------------------------


def test_blocks_are_pinned_only_while_copied() -> None:
    with Pair(receiver={"window": 2}) as pair:
        gate = threading.Event()
        pair.decode_cache.between = lambda: gate.wait(PATIENCE) and None
        pair.prefill.chunk = 1
        number = pair.fetch(4 * 8)
        pair.until(lambda: pair.prefill_cache.exported == 2 and len(pair.prefill.pinned) == 6)
        time.sleep(0.1)
        pair.prefill.step()
        assert pair.prefill_cache.exported == 2
        assert len(pair.prefill.pinned) == 6
        gate.set()
        assert pair.answer(number).outcome == "transferred"


def test_slow_import_does_not_delay_other_leases() -> None:
    with Pair(receiver={"window": 2, "idle_timeout": 30.0}) as pair:
        pair.decode_cache.between = lambda: time.sleep(0.05)
        numbers = [pair.fetch(4 * 40), pair.fetch(4)]
        pair.answer(numbers[1])
        assert numbers[0] not in pair.decode.fetched
        assert {fetched.outcome for fetched in pair.answers(numbers)} == {"transferred"}


@pytest.mark.timing
def test_posting_does_not_block() -> None:
    with Pair() as pair:
        copy = HeldCopy(pair.decode_cache)
        first = pair.fetch(8)
        pair.until(copy.begun.is_set)
        began = time.perf_counter()
        second = pair.fetch(8)
        pair.decode.cancel(second)
        pair.decode.step()
        assert time.perf_counter() - began < 5
        assert pair.decode.fetched[second].outcome == "aborted"
        copy.resume()
        assert pair.answer(first).outcome == "transferred"


def test_lease_expires_when_engine_loop_stalls() -> None:
    with Pair(receiver={"idle_timeout": 1.5}) as pair:
        pair.prefill.computes = False
        number = pair.fetch(8)
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            pair.prefill.step()
            pair.decode.step()
            time.sleep(0.01)
        assert number not in pair.decode.fetched
        pump(lambda: number in pair.decode.fetched, pair.decode)
        assert pair.decode.fetched[number].outcome == "expired"
        pair.until(lambda: len(pair.prefill.ended) == 1)
        pair.idle()


def test_lease_duration_is_bounded() -> None:
    with Pair(receiver={"longest": 0.3}) as pair:
        pair.prefill.computes = False
        assert pair.answer(pair.fetch(8)).outcome == "expired"
        pair.idle()
    with Pair(sender={"longest": 0.3}) as pair:
        pair.prefill.computes = False
        assert pair.answer(pair.fetch(8)).outcome == "lost"
        pair.idle()
        assert pair.sender.stats().ended == {"expired": 1}


# Rejections -------------------------------------------------------------------------------------------------


def test_incompatible_settings_are_rejected_with_reason() -> None:
    with Pair(sender={"compatibility": msgspec.structs.replace(COMPATIBILITY, block_size=8)}) as pair:
        fetched = pair.answer(pair.fetch(9))
        assert fetched.outcome == "refused"
        assert fetched.reason == "--block-size is 8 at the prefill worker and 4 at the decode worker"
        assert pair.sender.stats().refused == {"terms": 1}
        assert pair.prefill.arrived == []


def test_leases_beyond_the_limit_are_rejected() -> None:
    with Pair(sender={"max_leases": 2}) as pair:
        pair.prefill.computes = False
        numbers = [pair.fetch(4) for _ in range(5)]
        pair.until(lambda: len(pair.decode.fetched) == 3)
        pair.prefill.computes = True
        outcomes = [fetched.outcome for fetched in pair.answers(numbers)]
        assert sorted(outcomes) == ["refused"] * 3 + ["transferred"] * 2
        assert pair.sender.stats().refused == {"busy": 3}


def test_oversized_prompt_is_rejected_without_affecting_others() -> None:
    with Pair(sender={"max_tokens": 20}) as pair:
        numbers = [pair.fetch(20), pair.fetch(21), pair.fetch(8)]
        assert [fetched.outcome for fetched in pair.answers(numbers)] == ["transferred", "refused", "transferred"]
        assert "21 tokens" in pair.decode.fetched[numbers[1]].reason


def test_engine_may_reject_an_order() -> None:
    with Pair() as pair:
        pair.prefill.refuses = "it is shutting down"
        fetched = pair.answer(pair.fetch(8))
        assert (fetched.outcome, fetched.reason) == ("refused", "it is shutting down")
        pair.idle()
        assert pair.prefill.ended == []


def test_oversized_salt_is_rejected_locally() -> None:
    with Pair() as pair:
        assert pair.answer(pair.fetch(8, salt="x" * 2000)).outcome == "refused"


def test_wrong_secret_gets_no_reply() -> None:
    with Pair(sender={"secret": bytes(32)}, receiver={"idle_timeout": 0.3}) as pair:
        assert pair.answer(pair.fetch(8)).outcome == "expired"
        assert pair.sender.stats().dropped_frames > 0
        assert pair.sender.stats().leases == 0
        assert pair.receiver.stats().late_messages == pair.receiver.stats().dropped_frames == 0


def test_missing_connector_is_rejected_with_reason(caplog: pytest.LogCaptureFixture) -> None:
    with Pair() as pair:

        def missing(name: str) -> Frames:
            raise ConfigError("there is no connector of that name")

        pair.sender._make_connector = missing
        fetched = pair.answer(pair.fetch(8))
        assert fetched.outcome == "refused"
        assert "there is no connector of that name" in fetched.reason


# Ends of leases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["at once", "ordered", "half", "copying"])
def test_cancelled_fetch_ends_the_lease_on_both_sides(when: str) -> None:
    with Pair(receiver={"window": 1}) as pair:
        pair.prefill.computes = when in ("half", "copying")
        copy = HeldCopy(pair.decode_cache)
        if when != "copying":
            copy.resume()
        goes_on, copies = threading.Event(), itertools.count(1)
        if when == "half":
            pair.decode_cache.between = lambda: next(copies) > 4 and goes_on.wait(PATIENCE) and None
        number = pair.fetch(4 * 12)
        reached = {
            "at once": lambda: True,
            "ordered": lambda: len(pair.prefill.arrived) == 1,
            "half": lambda: pair.receiver.stats().pieces >= 3,
            "copying": copy.begun.is_set,
        }
        pair.until(reached[when])
        pair.decode.cancel(number)
        pair.decode.step()
        if when != "half":  # whether or not it is copying
            assert (number in pair.decode.fetched) == (when != "copying")
        copy.resume()
        goes_on.set()
        assert pair.answer(number).outcome == "aborted"
        pair.idle()
        pair.until(lambda: len(pair.prefill.free) == 64)
        assert pair.receiver.stats().outcomes == {"aborted": 1}
        if when == "ordered":
            pair.until(lambda: len(pair.prefill.ended) == 1)


def test_cancelled_request_ends_the_lease() -> None:
    with Pair() as pair:
        pair.prefill.computes = False
        number = pair.fetch(8)
        pair.until(lambda: bool(pair.prefill.jobs))
        pair.prefill.give_up(pair.prefill.arrived[0].lease)
        fetched = pair.answer(number)
        assert (fetched.outcome, fetched.reason) == ("lost", "the request was aborted")
        pair.idle()
        assert pair.prefill.ended == []


def test_cancelled_send_completes_at_once_and_ends_the_lease() -> None:
    with Pair(receiver={"window": 1}) as pair:
        gate = threading.Event()
        pair.decode_cache.between = lambda: gate.wait(PATIENCE) and None
        pair.prefill.chunk = 1
        number = pair.fetch(4 * 6)
        pair.until(lambda: len(pair.prefill.pinned) == 5)
        last = max(pair.prefill.pinned)
        pair.sender.perform([Cancel(last)])
        pair.prefill.step()
        assert last not in pair.prefill.pinned
        gate.set()
        assert pair.answer(number).outcome == "lost"
        pair.idle()
        assert pair.sender.stats().ended == {"failed": 1}


def test_send_cancelled_before_start_ends_the_lease() -> None:
    with Pair() as pair:
        pair.prefill.computes = False
        number = pair.fetch(4 * 6)
        pair.until(lambda: bool(pair.prefill.jobs))
        (job,) = pair.prefill.jobs.values()
        blocks = np.arange(6, dtype=np.int32)
        gate = threading.Event()
        pair.sender._loop.post(lambda: gate.wait(PATIENCE) and None)  # the thread is busy meanwhile
        pair.sender.perform([Send(70, job.job.lease, 0, blocks, tokens=24), Cancel(70), Cancel(70), Cancel(71)])
        gate.set()
        pair.prefill.pinned[70] = []
        assert pair.answer(number).outcome == "lost"
        pair.idle()
        assert pair.prefill_cache.broken_rules == []


def test_sends_for_ended_leases_are_completed() -> None:
    with Pair() as pair:
        pair.sender.perform([Send(5, "f" * 32, 0, np.array([1, 2], np.int32), tokens=8)])
        pair.prefill.pinned[5] = []
        pair.until(lambda: not pair.prefill.pinned)


def test_closing_prefill_side_loses_open_leases() -> None:
    with Pair() as pair:
        pair.prefill.computes = False
        numbers = [pair.fetch(8), pair.fetch(8)]
        pair.until(lambda: len(pair.prefill.jobs) == 2)
        pair.sender.close()
        pair.sender.perform([Send(99, "f" * 32, 0, np.array([1], np.int32))])
        assert pair.sender.completions() == [Sent(99)]
        pump(lambda: len(pair.decode.fetched) == 2, pair.decode)
        assert {pair.decode.fetched[number].outcome for number in numbers} == {"lost"}


def test_closing_decode_side_completes_fetches_and_aborts_leases() -> None:
    with Pair() as pair:
        pair.prefill.computes = False
        numbers = [pair.fetch(8), pair.fetch(8)]
        pair.until(lambda: len(pair.prefill.jobs) == 2)
        pair.receiver.close()
        pair.decode.step()
        assert [pair.decode.fetched[number].outcome for number in numbers] == ["aborted", "aborted"]
        later = pair.fetch(8)
        pair.decode.step()
        assert pair.decode.fetched[later].outcome == "aborted"
        pump(lambda: len(pair.prefill.ended) == 2, pair.prefill)
        assert pair.sender.stats().ended == {"aborted": 2}
        pair.receiver.close()


@pytest.mark.timing
def test_close_does_not_wait_for_hung_copy(caplog: pytest.LogCaptureFixture) -> None:
    with Pair() as pair:
        copy = HeldCopy(pair.decode_cache)
        stuck = pair.fetch(8)
        pair.until(copy.begun.is_set)
        other = pair.fetch(8)
        began = time.monotonic()
        pair.receiver.close()
        assert time.monotonic() - began < 5
        pair.decode.step()
        assert other in pair.decode.fetched
        assert stuck not in pair.decode.fetched  # its block may still be written to
        assert "its thread is abandoned" in caplog.text
        copy.resume()
        pump(lambda: stuck in pair.decode.fetched, pair.decode)


def test_thread_stuck_in_connector_does_not_block_fetches() -> None:
    gate = threading.Event()

    class Stuck(FrameInbox):
        def take(self, index, reference, frames):
            gate.wait(PATIENCE)
            raise ConnectorError("too late")

    with Pair(receiver={"longest": 0.1}) as pair:
        pair.connector.inbox = Stuck
        assert pair.answer(pair.fetch(8)).outcome == "expired"
        gate.set()


@pytest.mark.timing
def test_fetch_of_stuck_thread_ends_after_silence_timeout() -> None:
    gate = threading.Event()

    class Stuck(FrameInbox):
        def take(self, index, reference, frames):
            gate.wait(PATIENCE)
            raise ConnectorError("too late")

    with Pair(receiver={"idle_timeout": 0.3}) as pair:
        pair.connector.inbox = Stuck
        numbers = [pair.fetch(8), pair.fetch(8, salt="another")]
        began = time.monotonic()
        assert [fetched.outcome for fetched in pair.answers(numbers)] == ["expired", "expired"]
        assert time.monotonic() - began < 10
        assert {pair.decode.fetched[number].reason for number in numbers} == {
            "a copy or a call of the connector does not return"
        }
        gate.set()


def test_stuck_thread_does_not_pin_blocks_of_a_send(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    class Stuck(FrameOutbox):
        def put(self, index, parts):
            gate.wait(PATIENCE)
            raise ConnectorError("too late")

    monkeypatch.setattr(sender_module, "_STUCK_SECONDS", 1.0)
    with Pair(receiver={"idle_timeout": 0.3}) as pair:
        pair.connector.outbox = Stuck
        pair.fetch(12)
        pair.until(lambda: len(pair.prefill.pinned) > 0)
        pair.until(lambda: not pair.prefill.pinned)
        gate.set()


# Connections ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_refused_connection_is_lost_immediately(host: str) -> None:
    cache = ScriptedCache()
    receiver = make_receiver(cache, idle_timeout=60.0)
    decode = Fetches(receiver, cache)
    try:
        numbers = [decode.fetch(f"{host}:{free_port()}", 8) for _ in range(3)]
        pump(lambda: len(decode.fetched) == 3, decode)
        assert {decode.fetched[number].outcome for number in numbers} == {"lost"}
        assert receiver.stats().peers == 0
    finally:
        receiver.close()


@pytest.mark.parametrize("peer", ["nowhere", "127.0.0.1:99999", "no.such.host.invalid:1000", ":", "a b:1"])
def test_unroutable_address_is_lost(peer: str) -> None:
    cache = ScriptedCache()
    receiver = make_receiver(cache, idle_timeout=60.0)
    decode = Fetches(receiver, cache)
    try:
        number = decode.fetch(peer, 8)
        pump(lambda: number in decode.fetched, decode)
        assert decode.fetched[number].outcome == "lost"
    finally:
        receiver.close()


def test_restarted_worker_is_used_again() -> None:
    with Pair() as first:
        assert first.answer(first.fetch(8)).outcome == "transferred"
        port = first.sender.port
        first.sender.close()
        pump(lambda: first.receiver.stats().peers == 0, first.decode)
        with Pair(sender={"port": port}) as second:
            number = first.fetch(8)
            pump(lambda: number in first.decode.fetched, first.decode, second.prefill)
            assert first.decode.fetched[number].outcome == "transferred"


def test_connection_without_leases_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_KEEP_SECONDS", 0.1)
    with Pair() as pair:
        pair.answer(pair.fetch(8))
        pair.until(lambda: pair.receiver.stats().peers == 0)
        assert pair.answer(pair.fetch(8)).outcome == "transferred"


def test_port_in_use_error_names_the_flag() -> None:
    with Pair() as pair, pytest.raises(ConfigError, match="cannot listen") as error:
        make_sender(ScriptedCache(), port=pair.sender.port)
    assert error.value.field == "--transfer-port"


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_foreign_host_error_names_the_flag(host: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_sender(ScriptedCache(), host=host)
    assert error.value.field == "--transfer-host"


# Faulty connectors and caches -------------------------------------------------------------------------------


def assert_each_is_logged_once(caplog: pytest.LogCaptureFixture, count: int) -> None:
    """Check that the failure, and for a transfer the reason for the local prefill, is logged once."""
    messages = [record.getMessage() for record in caplog.records if record.name != "fd_core.access"]
    assert len(messages) == len(set(messages)) == count


class Fails:
    """Connector with endpoints that fail in one method."""

    def __init__(self, call: str, error: type[Exception]) -> None:
        self.call, self.error = call, error

    def fail(self, *_: object) -> None:
        raise self.error("secret words of the connector")

    def apply(self, pair: Pair) -> None:
        side = "inbox" if self.call in ("take", "done", "close inbox") else "outbox"
        base = FrameInbox if side == "inbox" else FrameOutbox
        setattr(pair.connector, side, type("Failing", (base,), {self.call.partition(" ")[0]: self.fail}))


@pytest.mark.parametrize("error", [ConnectorError, ValueError, MemoryError])
@pytest.mark.parametrize(
    "call, outcome", [("take", "damaged"), ("done", "damaged"), ("put", "lost"), ("close inbox", "transferred")]
)
def test_failing_connector_ends_only_its_lease(
    call: str, outcome: str, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Pair() as pair:
        Fails(call, error).apply(pair)
        for number in (pair.fetch(16), pair.fetch(16)):
            assert pair.answer(number).outcome == outcome
        pair.idle()
        errors = {**pair.sender.stats().errors, **pair.receiver.stats().errors}
        assert errors.keys() == {"connector"}
        assert_each_is_logged_once(caplog, 1 if outcome == "transferred" else 2)
        assert "secret" not in caplog.text


@pytest.mark.parametrize("call", ["open_inbox", "open_outbox"])
def test_connector_without_endpoint(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair() as pair:
        monkeypatch.setattr(pair.connector, call, Fails(call, RuntimeError).fail, raising=True)
        monkeypatch.setattr(
            pair.connector, call, lambda *a, **k: (_ for _ in ()).throw(RuntimeError("x")), raising=True
        )
        outcome = pair.answer(pair.fetch(8)).outcome
        assert outcome == ("lost" if call == "open_inbox" else "refused")


@pytest.mark.parametrize("value", [None, b"", "text", 7, [b"x"], b"x" * 10_000, np.zeros((4, 4))[:, ::2]])
def test_connector_returning_invalid_values(value: object) -> None:
    class Nonsense(FrameInbox):
        def take(self, index, reference, frames):
            return value

    with Pair() as pair:
        pair.connector.inbox = Nonsense
        assert pair.answer(pair.fetch(8)).outcome == "damaged"
        pair.idle()


def test_oversized_reference_ends_the_lease() -> None:
    class Long(FrameOutbox):
        def put(self, index, parts):
            return PutResult(bytes(1025))

    with Pair() as pair:
        pair.connector.outbox = Long
        assert pair.answer(pair.fetch(8)).outcome == "lost"
        pair.idle()


def test_swapped_pieces_are_damaged() -> None:
    class Swapping(FrameOutbox):
        def put(self, index, parts):
            return PutResult(b"", tuple(bytes(part)[::-1] for part in parts))

    with Pair() as pair:
        pair.connector.outbox = Swapping
        fetched = pair.answer(pair.fetch(8))
        assert fetched.outcome == "damaged"
        assert "piece 0" in fetched.reason
        pair.until(lambda: pair.sender.stats().ended == {"aborted": 1})


def test_replayed_value_is_damaged() -> None:
    """The value is complete and sealed with the secret for this lease and index, but is not the announced one."""

    class Exchanging(FrameOutbox):
        def put(self, index, parts):
            (job,) = pair.prefill.arrived
            return PutResult(b"", tuple(pair.sender._wire.seal_piece(job.lease, index, kv("other", index))[1]))

    with Pair() as pair:
        pair.connector.outbox = Exchanging
        fetched = pair.answer(pair.fetch(4))
        assert (fetched.outcome, fetched.reason) == ("damaged", "piece 0: damaged (wrong piece)")
        assert not pair.decode_cache.data.any()


@pytest.mark.parametrize("side, outcome", [("prefill_cache", "lost"), ("decode_cache", "damaged")])
def test_failing_cache_ends_only_its_lease(side: str, outcome: str, caplog: pytest.LogCaptureFixture) -> None:
    with Pair() as pair:
        getattr(pair, side).fails = RuntimeError
        for number in (pair.fetch(16), pair.fetch(16)):
            assert pair.answer(number).outcome == outcome
        pair.idle()
        assert_each_is_logged_once(caplog, 2)
        getattr(pair, side).fails = None
        assert pair.answer(pair.fetch(16)).outcome == "transferred"


def test_block_count_mismatch_is_reported_as_fault() -> None:
    with Pair() as pair:
        pair.receiver.perform([Fetch(77, pair.peer, PrefillJob(bytes(80)), np.array([1, 2], np.int32))])
        until = time.monotonic() + PATIENCE
        while not (answers := pair.receiver.completions()):
            assert time.monotonic() < until
        assert [one.outcome for one in answers if isinstance(one, Fetched)] == ["aborted"]


def test_transfers_are_not_compressed() -> None:
    with pytest.raises(ValueError, match="compress"):
        make_receiver(ScriptedCache(), envelope=Envelope(SECRET, "zlib"))
