"""A prefill and a decode engine, each with its end of the transfers, stepped in turns as two processes would be."""

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
from fd_core.testing.stepping.texts import Texts
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

    def until(self, done: Callable[[], bool], seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, "it does not come to that"
            self.turn()

    def run(self, *specs: RequestSpec) -> None:
        self.submit(*specs)
        self.until(lambda: not self.decode.has_work and not self.prefill.has_work)


@contextmanager
def pair(secret: str, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> Iterator[Pair]:
    both = {"transfer_secret_file": secret, "lease_seconds": 5.0}
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
    """Whether no lease is open and no block owned or held back, on either side."""
    return all(
        each.leases is not None
        and (each.leases.open, each.scheduler.slots.loading) == (0, 0)
        and (each.scheduler.blocks.used, each.scheduler.blocks.fenced) == (0, 0)
        for each in (engine.stats() for engine in (two.prefill, two.decode))
    )


def prefill_runs(two: Pair) -> None:
    """Step the prefill side until the order has come and a first chunk is computed."""
    deadline = time.monotonic() + 10
    while not two.prefill.stats().scheduler.slots.running:
        assert time.monotonic() < deadline
        two.prefill.step()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.law("6.2")
def test_texts_are_as_if_one_worker_had_computed_them(secret: str, depth: int) -> None:
    specs = random_specs(30, seed=5)
    with pair(secret, {"pipeline_depth": depth}, {"pipeline_depth": depth, "num_kv_blocks": 100}) as two:
        two.run(*specs)
        assert two.texts.tokens == golden(specs)
        assert set(two.outcomes.values()) == {"transferred", "held"}
        two.until(lambda: at_rest(two), 5)
        stats = two.decode.stats()
        assert stats.leases is not None
        assert stats.scheduler.transfers.outcomes["transferred"] > 15
        assert stats.scheduler.counters.recomputed_tokens == 0


def test_the_decode_side_computes_one_token_of_a_prompt(secret: str) -> None:
    with pair(secret) as two:
        two.run(LONG[0])
        assert two.outcomes == {"r0": "transferred"}
        assert two.decode.stats().scheduler.counters.budget_used == 20, "the last token of the prompt and 19 behind it"
        assert two.prefill.stats().scheduler.counters.budget_used >= 99


def test_what_the_prefill_side_had_cached_is_told_and_sent_too(secret: str) -> None:
    again = msgspec.structs.replace(LONG[0], request_id="again")
    with pair(secret) as two:
        two.run(LONG[0])
        two.decode._scheduler.probe().pool.forget_prefixes()
        two.run(again)
        assert two.outcomes["again"] == "transferred"
        assert two.cached["again"] == 96
        assert two.texts.tokens["again"] == golden(LONG[:1])["r0"]


@pytest.mark.law("6.3")
def test_a_decode_side_under_pressure_preempts_and_goes_on_by_itself(secret: str) -> None:
    with pair(secret, decode={"num_kv_blocks": 26, "max_num_seqs": 6}) as two:
        specs = [greedy(f"r{index}", range(index, index + 40), 100) for index in range(8)]
        two.run(*specs)
        assert two.texts.tokens == golden(specs)
        assert two.decode.stats().scheduler.counters.preemptions > 0
        two.until(lambda: at_rest(two), 5)


def test_a_prefill_side_under_pressure_preempts_and_sends_each_block_once(secret: str) -> None:
    with pair(secret, prefill={"num_kv_blocks": 25, "max_num_batched_tokens": 16}) as two:
        two.run(*LONG)
        assert two.texts.tokens == golden(LONG)
        assert set(two.outcomes.values()) == {"transferred"}


@pytest.mark.parametrize(
    "different, said",
    [({"block_size": 32, "num_kv_blocks": 20}, "--block-size is 32"), ({"max_model_len": 64}, "at most 64")],
    ids=["block size", "longest prompt"],
)
def test_a_prefill_side_that_does_not_fit_refuses_and_the_prompt_is_computed_here(
    secret: str, different: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pair(secret, prefill=different) as two:
        two.run(LONG[0])
        assert two.outcomes == {"r0": "refused"}
        assert two.texts.tokens == golden(LONG[:1])
        assert said in caplog.text
        two.until(lambda: at_rest(two), 5)


@pytest.mark.law("6")
def test_another_secret_gets_no_answer_and_the_prompt_is_computed_here(secret: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"another sixteen b")
    other.chmod(0o600)
    with pair(secret, {"transfer_secret_file": str(other)}, {"lease_seconds": 0.3}) as two:
        two.run(LONG[0])
        assert two.outcomes == {"r0": "expired"}
        assert two.texts.tokens == golden(LONG[:1])


@pytest.mark.timing
def test_nobody_at_the_address_is_found_out_at_once(secret: str) -> None:
    with pair(secret, decode={"lease_seconds": 60.0}) as two:
        two.prefill.close()
        began = time.monotonic()
        two.run(LONG[0])
        assert time.monotonic() - began < 5
        assert two.outcomes == {"r0": "lost"}
        assert two.texts.tokens == golden(LONG[:1])


@pytest.mark.law("6.1")
def test_an_abort_on_the_decode_side_ends_the_request_of_the_prefill_side(secret: str) -> None:
    with pair(secret, {"max_num_batched_tokens": 8}) as two:
        two.submit(LONG[0])
        two.decode.step()
        prefill_runs(two)
        two.take(two.decode.abort(["r0"]) + two.decode.step())
        deadline = time.monotonic() + 5
        while (leases := two.prefill.stats().leases) is not None and leases.open:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        two.until(lambda: at_rest(two), 5)
        assert two.prefill.stats().scheduler.outputs.finished[FinishReason.ABORT] == 1


def test_an_abort_on_the_prefill_side_leaves_the_prompt_to_the_decode_side(secret: str) -> None:
    with pair(secret, {"max_num_batched_tokens": 8}) as two:
        two.submit(LONG[0])
        two.decode.step()
        prefill_runs(two)
        two.prefill.abort_all()
        two.until(lambda: not two.decode.has_work)
        assert two.texts.tokens == golden(LONG[:1])
        assert two.outcomes["r0"] in ("lost", "aborted", "refused")


def test_a_prefill_side_that_shuts_down_takes_no_more(secret: str) -> None:
    with pair(secret) as two:
        two.prefill.stop()
        two.run(LONG[0])
        assert two.outcomes == {"r0": "refused"}
        assert two.texts.tokens == golden(LONG[:1])


def test_the_trace_of_the_decode_side_shows_what_was_fetched(secret: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with pair(secret, decode={"trace": str(file)}) as two:
        two.run(LONG[0])
    loads = [entry for line in file.read_text().splitlines()[1:] for entry in json.loads(line).get("loads", ())]
    ((began, ended, slot, request_id, blocks, loaded, from_host),) = loads
    assert (slot, request_id, blocks, loaded, from_host) == (0, "r0", 7, 7, 0)
    assert began <= ended


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_roles_need_names_of_blocks(role: str, secret: str) -> None:
    with pytest.raises(ConfigError, match="requires prefix caching"):
        null_engine(role=role, transfer_secret_file=secret, enable_prefix_caching=False)
