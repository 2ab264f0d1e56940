"""A decode and a prefill engine, one request at a time: golden texts, and bounded waits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fd_core.effects.operations import Send
from fd_core.scheduling.requests import State
from fd_core.types import Delta, FinishReason, PrefillOutcome, RequestSpec
from tests.engine.helpers import golden
from tests.engine.leased import Pair
from tests.engine.stepping import greedy, small_engine
from tests.engine.stored import keep_kv

LONG = greedy("long", range(38), 20)
FAILURES: list[PrefillOutcome] = ["refused", "lost", "expired", "damaged"]


def elsewhere(*specs: RequestSpec) -> list[RequestSpec]:
    return [msgspec.structs.replace(spec, prefill_at="peer:1") for spec in specs]


def pair_of(
    *specs: RequestSpec, k: int = 0, decode: dict[str, Any] | None = None, prefill: dict[str, Any] | None = None
) -> Pair:
    return Pair(
        small_engine(list(specs), k, 0.3, **(decode or {})),
        small_engine(list(specs), **(prefill or {"num_kv_blocks": 40})),
        eager=True,
    )


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [5, 8, 9, 38])
def test_text_after_kv_transfer_is_golden(length: int, depth: int, k: int) -> None:
    spec = greedy("a", range(length), 20)
    pair = pair_of(spec, k=k)
    pair.decode.submit(*elsewhere(spec))
    assert pair.run(depth).tokens == golden([spec])
    assert pair.outcomes == ["transferred"]
    assert sum(pair.decode.computed) < length + 20 * (1 + k), "the prompt was computed here after all"
    assert sum(pair.prefill.computed) == length - 1


@pytest.mark.parametrize("outcome", FAILURES)
@pytest.mark.law("6.3")
def test_text_after_failed_transfer_is_golden(outcome: PrefillOutcome) -> None:
    pair = pair_of(LONG)
    pair.decode.submit(*elsewhere(LONG))
    pair.decode.turn(1)
    (lease,) = pair.undelivered
    pair.ask(lease)
    for _ in range(2):
        pair.prefill.turn(1)
    pair.end(lease, outcome)
    assert pair.run().tokens == golden([LONG])
    assert pair.outcomes == [outcome]


def test_client_receives_prefill_outcome_once() -> None:
    pair = pair_of(LONG)
    received: list[Delta] = []
    take = pair.decode.texts.take
    pair.decode.texts.take = lambda deltas: (received.extend(deltas), take(deltas))[1]  # type: ignore[method-assign]  # listens
    pair.decode.submit(*elsewhere(LONG))
    pair.run()
    assert [delta.prefill for delta in received] == ["transferred", *[None] * (len(received) - 1)]


def test_prefix_cached_on_device_is_not_sent() -> None:
    other = greedy("other", [*range(17), *range(50, 70)], 20)
    pair = pair_of(LONG, other)
    pair.decode.submit(*elsewhere(LONG))
    pair.run()
    pair.decode.submit(*elsewhere(other))
    pair.decode.turn(1)
    (lease,) = pair.undelivered
    assert (lease.fetch.job.held_blocks, len(lease.fetch.blocks)) == (4, 5)
    assert pair.run().tokens == golden([LONG, other])
    assert pair.prefill.probe.transferring.counters.sent_blocks == 10 + 5


def test_sequential_requests_fetch_shared_prompt_once() -> None:
    specs = [greedy(f"r{index}", range(38), 6) for index in range(4)]
    pair = pair_of(*specs, decode={"num_kv_blocks": 40})
    for spec in elsewhere(*specs):
        pair.decode.submit(spec)
        pair.run()
    assert pair.decode.texts.tokens == golden(specs)
    assert pair.outcomes == ["transferred"]
    assert pair.decode.probe.transferring.counters.outcomes == {"transferred": 1, "held": 3}


def test_concurrent_requests_each_fetch_shared_prompt() -> None:
    specs = [greedy(f"r{index}", range(38), 6) for index in range(4)]
    pair = pair_of(*specs, decode={"num_kv_blocks": 60})
    pair.decode.submit(*elsewhere(*specs))
    assert pair.run().tokens == golden(specs)
    assert pair.outcomes == ["transferred"] * 4
    assert sum(pair.prefill.computed) < 2 * 37, "the prefill worker computes it once"


def test_request_without_prefill_worker_ignores_ongoing_fetch() -> None:
    """A fetch may take long, so no other request waits for it."""
    same = greedy("same", range(38), 6)
    pair = pair_of(LONG, same, decode={"num_kv_blocks": 60})
    pair.decode.submit(*elsewhere(LONG))
    pair.decode.turn(1)
    pair.decode.submit(same)
    pair.decode.turn(1, times=12)
    assert pair.decode.texts.ends == {"same": FinishReason.LENGTH}
    assert pair.run().tokens == golden([LONG, same])


@pytest.mark.parametrize("salts", [("", "s"), ("tenant-1", "tenant-2"), ("a", "ab")])
def test_fetched_kv_is_not_shared_between_salts(salts: tuple[str, str]) -> None:
    specs = [greedy(f"r{index}", LONG.prompt, 20, cache_salt=salt) for index, salt in enumerate(salts)]
    pair = pair_of(*specs, decode={"num_kv_blocks": 40})
    for spec in specs:
        pair.decode.submit(*elsewhere(spec))
        pair.run()
    assert pair.decode.texts.tokens == golden(specs)
    assert sum(pair.prefill.computed) == 2 * 37


def test_all_slots_recover_from_rejecting_prefill_worker() -> None:
    specs = [greedy(f"r{index}", range(20 * index, 20 * index + 14), 20) for index in range(8)]
    pair = pair_of(*specs)
    pair.decode.submit(*elsewhere(*specs))
    pair.decode.turn(1)
    assert int(pair.decode.probe.slots.loading.sum()) == 4
    assert int(pair.decode.probe.slots.running.sum()) == 0
    for _ in range(200):
        for lease in pair.undelivered:
            pair.refuse(lease)
            pair.end(lease, "refused")
        pair.decode.turn(1)
    assert pair.run().tokens == golden(specs)
    assert pair.outcomes == ["refused"] * 8
    assert not sum(pair.prefill.computed)


def test_running_requests_progress_while_others_fetch() -> None:
    """Slow leases delay only requests that need their blocks."""
    runs = greedy("runs", [1, 2, 3], 20)
    specs = [runs, *(greedy(f"r{index}", range(20 * index, 20 * index + 9), 3) for index in range(3))]
    pair = pair_of(*specs)
    pair.decode.submit(runs)
    pair.decode.turn(1)
    pair.decode.submit(*elsewhere(*specs[1:]))
    pair.decode.turn(1, times=25)
    assert int(pair.decode.probe.slots.loading.sum()) == 3
    assert pair.decode.texts.ends == {"runs": FinishReason.LENGTH}
    assert pair.run().tokens == golden(specs)


def test_preempted_prefill_resumes_sending_after_sent_blocks() -> None:
    direct = greedy("direct", range(60, 63), 50)
    pair = pair_of(LONG, direct, prefill={"max_num_batched_tokens": 4, "victim_policy": "youngest"})
    pair.prefill.submit(direct)
    pair.prefill.turn(1)
    pair.decode.submit(*elsewhere(LONG))
    pair.decode.turn(1)
    (lease,) = pair.undelivered
    pair.ask(lease)
    pair.prefill.turn(1, times=5)
    while pair.reading:
        pair.read(0)
    num_offered = lease.num_offered
    assert 0 < num_offered < 10
    pool = pair.prefill.probe.pool
    hostage = pool.allocate(pool.num_free)
    assert hostage is not None
    audit, pair.prefill.audit = pair.prefill.audit, lambda: None  # type: ignore[method-assign]  # a foreign owner
    while pair.prefill.state_of(lease.name) is not State.WAITING:
        pair.prefill.turn(1)
        assert lease.tokens is None
        while pair.reading:
            pair.read(0)
    pool.release(hostage, -1)
    pair.prefill.audit = audit  # type: ignore[method-assign]
    assert lease.num_offered >= num_offered
    assert pair.run().tokens == golden([LONG])
    assert pair.outcomes == ["transferred"]
    assert pair.prefill.probe.running_batch.counters.preemptions == 1
    assert pair.prefill.texts.tokens["direct"] == golden([direct])["direct"]


def test_abort_at_decode_worker_frees_prefill_worker() -> None:
    pair = pair_of(LONG, prefill={"max_num_batched_tokens": 4})
    pair.decode.submit(*elsewhere(LONG))
    pair.decode.turn(1)
    (lease,) = pair.undelivered
    pair.ask(lease)
    pair.prefill.turn(1, times=3)
    pair.decode.abort("long")
    assert pair.decode.texts.ends == {"long": FinishReason.ABORT}
    pair.run()
    assert pair.outcomes == ["aborted"]
    assert sum(pair.prefill.computed) < 37


def test_blocks_being_read_are_awaited_before_preempting() -> None:
    other = greedy("other", range(60, 80), 20)
    pair = pair_of(LONG, other, prefill={"num_kv_blocks": 16})
    pair.decode.submit(*elsewhere(LONG))
    pair.decode.turn(1)
    pair.ask(pair.undelivered[0])
    pair.prefill.turn(1, times=3)
    assert pair.prefill.probe.pool.num_fenced == 10, "no read has completed"
    pair.prefill.submit(other)
    pair.prefill.turn(1, times=30)
    assert pair.prefill.state_of("other") is State.RUNNING
    assert pair.prefill.plan() is None, "it needs a block that will be freed"
    assert pair.run().tokens == golden([LONG])
    assert pair.prefill.texts.tokens["other"] == golden([other])["other"]
    assert not pair.prefill.probe.running_batch.counters.preemptions


def test_offloaded_prefix_is_sent_once_loaded() -> None:
    pair = pair_of(LONG)
    tiers = keep_kv(pair.prefill, finished=True)
    pair.decode.submit(*elsewhere(LONG))
    pair.run()
    assert tiers.values
    for worker in (pair.decode, pair.prefill):
        worker.probe.pool.forget_prefixes()
    before = len(pair.prefill.computed)
    again = greedy("again", LONG.prompt, 20)
    pair.decode.submit(*elsewhere(again))
    assert pair.run().tokens["again"] == golden([LONG])["long"]
    assert pair.outcomes == ["transferred"] * 2
    assert sum(pair.prefill.computed[before:]) == 1
    assert pair.prefill.probe.transferring.counters.sent_blocks == 20


def test_next_epoch_refetches_only_requests_without_output() -> None:
    second = greedy("second", range(60, 80), 20)
    pair = pair_of(LONG, second, decode={"num_kv_blocks": 40})
    specs = elsewhere(LONG, second)
    pair.decode.submit(specs[0])
    for _ in range(12):
        pair.decode.turn(1)
        pair.prefill.turn(1)
        pair.calm()
    pair.decode.submit(specs[1])
    pair.decode.turn(1)
    delivered = tuple(pair.decode.texts.tokens["long"])
    assert 0 < len(delivered) < 20
    assert len(pair.undelivered) == 1
    old = pair.undelivered[0].name
    pair.replace(pair.decode, small_engine([LONG, second], num_kv_blocks=40))
    pair.decode.submit(msgspec.structs.replace(specs[0], delivered=delivered), specs[1])
    pair.decode.turn(1, times=3)
    assert [lease.fetch.job.token_ids[0] for lease in pair.awaited if lease.name != old] == [60]
    assert pair.run().tokens == golden([LONG, second])


def test_send_reports_cached_tokens() -> None:
    pair = pair_of(LONG)
    pair.decode.submit(*elsewhere(LONG))
    pair.run()
    pair.decode.probe.pool.forget_prefixes()
    again = greedy("again", LONG.prompt, 4)
    pair.decode.submit(*elsewhere(again))
    pair.decode.turn(1)
    pair.ask(pair.undelivered[0])
    pair.prefill.turn(1)
    last: list[Send] = [send for _, send in pair.reading if send.tokens is not None]
    assert [send.cached for send in last] == [36]
    request = pair.decode.probe.requests["again"]
    pair.calm()
    assert request.cached_tokens == 36
    pair.run()
