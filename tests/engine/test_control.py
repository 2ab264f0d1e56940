"""Orders to a running engine: pause and resume lose nothing in any order of events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.engine.process import messages
from fd_core.errors import FdError
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.testing.models.texts import Texts
from fd_core.types import FinishReason
from tests.engine.building.test_kv_transfer import LONG, pair, secret
from tests.engine.helpers import golden, null_engine, random_specs
from tests.engine.stepping import SMALL

__all__ = ["secret"]


def ordered(engine: Engine, order: messages.ControlOrder, texts: Texts) -> FdError | None:
    """Give an order and step until it is carried out; return its error."""
    results: list[FdError | None] = []
    engine.control(order, results.append)
    for _ in range(1000):
        if results:
            return results[0]
        texts.take(engine.step())
    raise AssertionError(f"{order} was not carried out")


def finish(engine: Engine, texts: Texts) -> None:
    while engine.has_work:
        texts.take(engine.step())


SPECS = random_specs(12, seed=3, max_prompt=20, max_tokens=40)


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_depth": 1},
        {"pipeline_depth": 2},
        {"pipeline_depth": 2, "enable_prefix_caching": False},
        {"pipeline_depth": 2, "host_kv_memory": 0},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_texts_equal_those_without_pauses(settings: dict[str, Any]) -> None:
    engine, texts = null_engine(**SMALL | settings), Texts()
    for index, spec in enumerate(SPECS):
        texts.take(engine.submit(spec))
        for _ in range(index % 4):
            texts.take(engine.step())
        if index % 3 == 0:
            assert ordered(engine, messages.PauseGeneration(), texts) is None
            held = engine.holdings()
            assert (held.running, held.draining, held.loading, held.fenced, held.owned) == (0, 0, 0, 0, 0)
            assert held.waiting and not engine.has_work
            assert ordered(engine, messages.ResumeGeneration(), texts) is None
    finish(engine, texts)
    assert texts.tokens == golden(SPECS)
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("paused", ["prefill", "decode"])
def test_either_worker_of_a_pair_may_be_paused(secret: str, paused: str) -> None:
    with pair(secret) as two:
        engine = two.prefill if paused == "prefill" else two.decode
        two.submit(*LONG[:3])
        for _ in range(3):
            two.turn()
        results: list[FdError | None] = []
        engine.control(messages.PauseGeneration(), results.append)
        two.until(lambda: bool(results))
        two.submit(*LONG[3:])
        for _ in range(10):
            two.turn()
        assert engine.holdings().running == 0
        engine.control(messages.ResumeGeneration(), results.append)
        two.until(lambda: not two.decode.has_work and not two.prefill.has_work)
        assert results == [None, None]
        assert two.texts.tokens == golden(LONG)


def test_paused_engine_computes_nothing_and_aborts_waiting_requests() -> None:
    engine, texts = null_engine(**SMALL), Texts()
    texts.take(engine.submit(SPECS[0]))
    texts.take(engine.step())
    ordered(engine, messages.PauseGeneration(), texts)
    texts.take(engine.submit(SPECS[1]))
    finish(engine, texts)
    assert engine.step() == [] and not texts.tokens.get(SPECS[1].request_id)
    texts.take(engine.abort([SPECS[0].request_id]))
    assert texts.ends == {SPECS[0].request_id: FinishReason.ABORT}
    ordered(engine, messages.ResumeGeneration(), texts)
    finish(engine, texts)
    assert texts.tokens[SPECS[1].request_id] == golden(SPECS)[SPECS[1].request_id]
    engine.close()


def test_orders_are_carried_out_in_their_order() -> None:
    engine, done = null_engine(**SMALL), []
    engine.submit(SPECS[0])
    engine.step()
    orders = (messages.PauseGeneration(), messages.ResumeGeneration(), messages.PauseGeneration())
    for number, order in enumerate(orders):
        engine.control(order, lambda error, number=number: done.append((number, error, engine.info.paused)))
    while engine.has_work:
        engine.step()
    assert done == [(0, None, True), (1, None, False), (2, None, True)]
    engine.close()


@pytest.mark.slow
def test_stages_lose_nothing_in_a_pause(tmp_path: Path) -> None:
    path = write_checkpoint("llama", tmp_path / "model", num_hidden_layers=2, vocab_size=258)
    values: dict[str, Any] = {"model": "tiny", "backend": "reference", "max_model_len": 100, "num_kv_blocks": 60}
    found = []
    for stages in (1, 2):
        config = EngineConfig(**values, pipeline_parallel_size=stages, structured_output=False)
        engine, texts = load_engine(config, path, progress=lambda *_: None), Texts()
        for spec in SPECS[:4]:
            texts.take(engine.submit(spec))
        for _ in range(3):
            texts.take(engine.step())
        if stages == 2:
            assert ordered(engine, messages.PauseGeneration(), texts) is None
            assert ordered(engine, messages.ResumeGeneration(), texts) is None
        finish(engine, texts)
        found.append(texts.tokens)
        engine.close()
    assert found[0] == found[1]
