"""Storage: KV outside the device, protocol 5, in tiers whose operations the test completes."""

from __future__ import annotations

import pytest

from fd_core.effects.operations import Load, LoadPaceMeasured, Lookup, NotStored, PrefillPaceMeasured, Save
from fd_core.errors import BadRequest
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.testing.kit.law import require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.driver import Driver, SchedulerTarget, drive, prompt_of
from fd_core.testing.schedulers.suite.test_signals import long_ones
from fd_core.testing.schedulers.tiers import OperationEnd
from fd_core.types import FinishReason

ENDS = list(OperationEnd)


def run_ending(driver: Driver, how: OperationEnd, depth: int) -> None:
    """Run to the end; every operation gets this outcome some steps after its start."""
    for _ in range(2000):
        driver.fill(depth)
        busy = bool(driver.in_flight or driver.tiers.pending)
        if driver.in_flight:
            driver.answer()
        if len(driver.tiers.pending) > 2 or (driver.tiers.pending and not driver.in_flight):
            driver.complete(0, how)
        if not busy:
            break
    driver.run(depth)


@pytest.mark.law("5.2")
def test_saved_blocks_are_loaded(target: SchedulerTarget) -> None:
    driver = drive(target, *long_ones(4), keep=OffloadSelection())
    driver.run()
    if not driver.auditor.preemptions:
        lacks("the scheduler preempts nobody here")
    require_loaded(driver, new={8})


@pytest.mark.law("5.2")
def test_texts_are_loaded_with_their_output(target: SchedulerTarget) -> None:
    """The next turn of a conversation, of which the device holds nothing."""
    driver, prompt = drive(target, keep=OffloadSelection(True, True, True)), prompt_of(9)
    for name, tokens, count in (("first", prompt, 30), ("other", prompt_of(63, 1), 1)):
        driver.submit(greedy(name, tokens, count))
        driver.run()
    if not driver.begun(Save):
        lacks("the scheduler stores nothing here")
    driver.submit(greedy("again", [*prompt, *driver.texts.tokens["first"]], 1))
    driver.run()
    require_loaded(driver, new={9, 63})


def require_loaded(driver: Driver, new: set[int]) -> None:
    """Require admissions, unless their lengths are `new`, to load all whole blocks; the last token has no KV."""
    size = driver.limits.block_size
    for each in (admission for plan in driver.plans for admission in plan.admissions):
        count = len(each.token_ids)
        stored = (count - 1) // size * size
        what = f"{each.request_id} returns with {count} tokens, of which {stored} were saved, and begins at"
        require(count in new or each.computed >= stored, "5.2", f"{what} {each.computed}")


@pytest.mark.law("5.1", "1.7")
def test_silent_store_does_not_block_other_calls(target: SchedulerTarget) -> None:
    """A lookup and a save stay open until other requests have finished; then everything continues."""
    prompt = prompt_of(13)
    driver = drive(target, greedy("first", prompt, 4), keep=OffloadSelection(True, True, True))
    driver.run()
    driver.submit(*(greedy(f"r{index}", prompt_of(9, index), 8) for index in range(3)))
    silent = [each.operation for each in driver.tiers.pending if isinstance(each, Lookup)]
    for _ in range(60):
        if driver.plan() is not None:
            driver.answer()
    driver.submit(greedy("aborted", prompt_of(9, 99), 4))
    driver.abort("aborted")
    require(driver.texts.ends["aborted"] is FinishReason.ABORT, "1.7", "its abort waits for storage")
    run_ending(driver, OperationEnd.BADLY, 1)
    require(all(end for end in driver.texts.ends.values()), "5.5", f"operations {silent} were open for long")


def run_returning(driver: Driver, how: OperationEnd) -> None:
    """Run a prompt with stored KV that is no longer on the device; every load gets this outcome."""
    prompt = prompt_of(29)
    for name, again in (("first", prompt), ("other", prompt_of(63, 1)), ("again", prompt)):
        driver.tiers.begun.clear()
        driver.submit(greedy(name, again, 1))
        while driver.plan() is not None or driver.in_flight or driver.tiers.pending:
            if driver.in_flight:
                driver.answer()
            for _ in range(len(driver.tiers.pending)):
                loads = isinstance(driver.tiers.pending[0], Load)
                driver.complete(0, how if loads else OperationEnd.WELL)
    driver.run()


@pytest.mark.law("5.4", "4")
def test_damaged_value_is_recomputed_and_stored_again(target: SchedulerTarget) -> None:
    driver = drive(target, keep=OffloadSelection(True, True, True))
    run_returning(driver, OperationEnd.BADLY)
    if not (loads := driver.begun(Load)):
        lacks("the scheduler loads nothing here")
    lost = {*loads[0].keys} - {key for each in driver.begun(Save) for key in each.keys}
    require(not lost, "5.4", f"{len(lost)} blocks were damaged in the store, but are not stored again")


@pytest.mark.law("5.6")
@pytest.mark.parametrize("term", ["host", "store", "latency", "all"])
@pytest.mark.parametrize("times", [0.4, 2.5])
@pytest.mark.parametrize("size", [2, 8])
def test_kv_is_loaded_only_where_that_beats_computing_it(
    target: SchedulerTarget, size: int, times: float, term: str
) -> None:
    """Loading takes so many times as long as computing the same tokens, because of a term or of all."""
    driver = drive(target, keep=OffloadSelection(True, True, True), block_size=size, num_kv_blocks=64 // size)
    compute, blocks = 1e-4, 28 // size
    whole, on_host = times * compute * blocks * size, blocks // 2
    by_term = {"host": whole / on_host, "store": whole / (blocks - on_host), "latency": whole}
    host, store, latency = (each / 3 if term == "all" else each * (name == term) for name, each in by_term.items())
    driver.tell(PrefillPaceMeasured(compute))
    driver.tell(LoadPaceMeasured(host, store, latency))
    run_returning(driver, OperationEnd.WELL)
    loads = driver.begun(Load)
    what = f"a token is computed in {compute:g} s, a block of {size} loaded in {host:g} s from the host tier and in"
    what = f"{what} {store:g} s from the store, after {latency:g} s, and {len(loads)} loads begin"
    require(bool(loads) == (times < 1), "5.6", what)


@pytest.mark.law("5.4")
def test_values_that_the_store_lost_are_stored_again(target: SchedulerTarget) -> None:
    """The store evicts everything; the same prompt is used again."""
    driver = drive(target, greedy("first", prompt_of(29), 1), keep=OffloadSelection(True, True, True))
    run_ending(driver, OperationEnd.WELL, 1)
    saved = {key for each in driver.begun(Save) for key in each.keys}
    if not saved:
        lacks("the scheduler stores nothing here")
    driver.tiers.values.clear()
    driver.tiers.begun.clear()
    driver.tell(NotStored(tuple(saved)))
    driver.submit(greedy("again", prompt_of(29), 1))
    run_ending(driver, OperationEnd.WELL, 1)
    lost = saved - {key for each in driver.begun(Save) for key in each.keys}
    require(not lost, "5.4", f"the store lost {len(saved)} blocks, of which {len(lost)} are not stored again")


@pytest.mark.law("5.4")
def test_keys_of_kv_depend_on_the_nonce_of_the_weights(target: SchedulerTarget) -> None:
    """Let engines share a store: their KV may be exchanged where their weights had the same nonces."""

    def keys_after(*nonces: bytes) -> set[bytes]:
        driver = drive(target, keep=OffloadSelection(True, True, True))
        for nonce in nonces:
            driver.scheduler.pause()
            effects = driver.scheduler.change_weights(nonce)
            driver.auditor.forgot(effects, new_weights=True)
            driver.tiers.perform(effects.operations)
            driver.scheduler.resume()
        driver.submit(greedy("first", prompt_of(29), 1))
        run_ending(driver, OperationEnd.WELL, 1)
        return {key for each in driver.begun(Save) for key in each.keys}

    try:
        first, same, other = keys_after(b"a"), keys_after(b"a"), keys_after(b"b")
    except BadRequest:
        lacks("the scheduler cannot change weights")
    if not first:
        lacks("the scheduler stores nothing here")
    require(first == same, "5.4", "after the same change of weights in two engines, equal prompts have other keys")
    require(not first & other, "5.4", "KV of other weights has the same keys: change_weights ignores its nonce")
