"""A prefill and a decode engine with their transfer endpoints, stepped in turns like two processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fd_core.engine.core import Engine
from fd_core.errors import ConfigError
from fd_core.testing.models.texts import Texts
from fd_core.types import FinishReason, RequestSpec
from tests.engine.helpers import golden, null_engine, random_specs
from tests.engine.stepping import greedy

LONG = [greedy(f"r{index}", range(index, index + 100), 20) for index in range(6)]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    file = tmp_path / "secret"
    file.write_bytes(b"of sixteen bytes")
    file.chmod(0o600)
    return str(file)


class Pair:
    """Two engines; requests go to the decode side."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode
        self.texts = Texts()
        self.outcomes: dict[str, str | None] = {}
        self.cached: dict[str, int | None] = {}

    def submit(self, *specs: RequestSpec) -> None:
        peer = f"127.0.0.1:{self.prefill.info.kv_port}"
        for spec in specs:
            self.take(self.decode.submit(msgspec.structs.replace(spec, prefill_at=peer)))

    def take(self, deltas: list[Any]) -> None:
        for delta in deltas:
            if delta.request_id not in self.outcomes and delta.token_ids:
                self.outcomes[delta.request_id], self.cached[delta.request_id] = delta.prefill, delta.cached_tokens
        self.texts.take(deltas)

    def turn(self) -> None:
        self.prefill.step()
        self.take(self.decode.step())

    def until(self, done: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, "the expected state was never reached"
            self.turn()

    def run(self, *specs: RequestSpec) -> None:
        self.submit(*specs)
        self.until(lambda: not self.decode.has_work and not self.prefill.has_work)


@contextmanager
def pair(secret: str, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> Iterator[Pair]:
    both = {"transfer_secret_file": secret, "lease_seconds": 60.0}
    engines = [
        null_engine(**(both | {"role": "prefill"} | (prefill or {}))),
        null_engine(**(both | {"role": "decode"} | (decode or {}))),
    ]
    two = Pair(*engines)
    try:
        yield two
        for engine in engines:
            engine.check_integrity()
    finally:
        for engine in engines:
            engine.close()


def at_rest(two: Pair) -> bool:
    """Return True if no lease is open and neither side owns or fences a block."""
    return all(
        each.leases is not None
        and (each.leases.open, each.scheduler.slots.loading) == (0, 0)
        and (each.scheduler.blocks.used, each.scheduler.blocks.fenced) == (0, 0)
        for each in (engine.stats() for engine in (two.prefill, two.decode))
    )


def prefill_runs(two: Pair) -> None:
    """Step the prefill side until the order has arrived and a first chunk is computed."""
    deadline = time.monotonic() + 60
    while not two.prefill.stats().scheduler.slots.running:
        assert time.monotonic() < deadline
        two.prefill.step()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.law("6.2")
def test_texts_equal_those_of_a_single_worker(secret: str, depth: int) -> None:
    specs = random_specs(30, seed=5)
    with pair(secret, {"pipeline_depth": depth}, {"pipeline_depth": depth, "num_kv_blocks": 100}) as two:
        two.run(*specs)
        assert two.texts.tokens == golden(specs)
        assert set(two.outcomes.values()) == {"transferred", "held"}
        two.until(lambda: at_rest(two))
        stats = two.decode.stats()
        assert stats.leases is not None
        assert stats.scheduler.transfers.outcomes["transferred"] > 15
        assert stats.scheduler.counters.recomputed_tokens == 0


def test_decode_worker_computes_only_last_prompt_token(secret: str) -> None:
    with pair(secret) as two:
        two.run(LONG[0])
        assert two.outcomes == {"r0": "transferred"}
        assert two.decode.stats().scheduler.counters.budget_used == 20, "the last prompt token and 19 generated tokens"
        assert two.prefill.stats().scheduler.counters.budget_used >= 99


def test_cached_prefix_of_prefill_worker_is_reported_and_sent(secret: str) -> None:
    again = msgspec.structs.replace(LONG[0], request_id="again")
    with pair(secret) as two:
        two.run(LONG[0])
        two.decode._scheduler.probe().pool.forget_prefixes()
        two.run(again)
        assert two.outcomes["again"] == "transferred"
        assert two.cached["again"] == 96
        assert two.texts.tokens["again"] == golden(LONG[:1])["r0"]


@pytest.mark.law("6.3")
def test_decode_worker_recovers_from_preemption_without_new_lease(secret: str) -> None:
    with pair(secret, decode={"num_kv_blocks": 26, "max_num_seqs": 6}) as two:
        specs = [greedy(f"r{index}", range(index, index + 40), 100) for index in range(8)]
        two.run(*specs)
        assert two.texts.tokens == golden(specs)
        assert two.decode.stats().scheduler.counters.preemptions > 0
        two.until(lambda: at_rest(two))


def test_preempting_prefill_worker_sends_each_block_once(secret: str) -> None:
    with pair(secret, prefill={"num_kv_blocks": 25, "max_num_batched_tokens": 16}) as two:
        two.run(*LONG)
        assert two.texts.tokens == golden(LONG)
        assert set(two.outcomes.values()) == {"transferred"}


@pytest.mark.parametrize(
    "different, expected",
    [
        ({"block_size": 32, "num_kv_blocks": 20}, "--block-size is 32"),
        ({"max_model_len": 64}, "exceeds the prefill worker's 64"),
    ],
    ids=["block size", "longest prompt"],
)
def test_incompatible_prefill_worker_falls_back_to_local_prefill(
    secret: str, different: dict[str, Any], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pair(secret, prefill=different) as two:
        two.run(LONG[0])
        assert two.outcomes == {"r0": "refused"}
        assert two.texts.tokens == golden(LONG[:1])
        two.until(lambda: at_rest(two) and expected in caplog.text)


@pytest.mark.law("6")
def test_wrong_secret_falls_back_to_local_prefill(secret: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"another sixteen b")
    other.chmod(0o600)
    with pair(secret, {"transfer_secret_file": str(other)}, {"lease_seconds": 0.3}) as two:
        two.run(LONG[0])
        assert two.outcomes == {"r0": "expired"}
        assert two.texts.tokens == golden(LONG[:1])


@pytest.mark.timing
def test_unreachable_prefill_worker_is_detected_immediately(secret: str) -> None:
    with pair(secret, decode={"lease_seconds": 60.0}) as two:
        two.prefill.close()
        began = time.monotonic()
        two.run(LONG[0])
        assert time.monotonic() - began < 5
        assert two.outcomes == {"r0": "lost"}
        assert two.texts.tokens == golden(LONG[:1])


@pytest.mark.law("6.1")
def test_abort_on_decode_worker_ends_prefill_request(secret: str) -> None:
    with pair(secret, {"max_num_batched_tokens": 8}) as two:
        two.submit(LONG[0])
        two.decode.step()
        prefill_runs(two)
        two.take(two.decode.abort(["r0"]) + two.decode.step())
        deadline = time.monotonic() + 60
        while (leases := two.prefill.stats().leases) is not None and leases.open:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        two.until(lambda: at_rest(two))
        assert two.prefill.stats().scheduler.outputs.finished[FinishReason.ABORT] == 1


def test_abort_on_prefill_worker_falls_back_to_local_prefill(secret: str) -> None:
    with pair(secret, {"max_num_batched_tokens": 8}) as two:
        two.submit(LONG[0])
        two.decode.step()
        prefill_runs(two)
        two.prefill.abort_all()
        two.until(lambda: not two.decode.has_work)
        assert two.texts.tokens == golden(LONG[:1])
        assert two.outcomes["r0"] in ("lost", "aborted", "refused")


def test_prefill_worker_shutting_down_rejects_new_orders(secret: str) -> None:
    with pair(secret) as two:
        two.prefill.stop()
        two.run(LONG[0])
        assert two.outcomes == {"r0": "refused"}
        assert two.texts.tokens == golden(LONG[:1])


def test_decode_trace_shows_fetched_blocks(secret: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with pair(secret, decode={"trace": str(file)}) as two:
        two.run(LONG[0])
    loads = [entry for line in file.read_text().splitlines()[1:] for entry in json.loads(line).get("loads", ())]
    ((began, ended, slot, request_id, blocks, loaded, from_host),) = loads
    assert (slot, request_id, blocks, loaded, from_host) == (0, "r0", 7, 7, 0)
    assert began <= ended


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_disagg_roles_require_prefix_caching(role: str, secret: str) -> None:
    with pytest.raises(ConfigError, match="requires prefix caching"):
        null_engine(role=role, transfer_secret_file=secret, enable_prefix_caching=False)
