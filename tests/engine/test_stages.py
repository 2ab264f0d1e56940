"""Pipeline-parallel stages in separate processes: identical texts under any plan, and recovery from a lost stage."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.clients.process import ProcessClient
from fd_core.engine.core import Engine
from fd_core.errors import ConfigError
from fd_core.scheduling.running.planner import Planner
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.types import Pooling, RequestSpec, SamplingParams
from tests.engine.building.test_kv_transfer import Pair
from tests.engine.clients.test_process import until
from tests.engine.faults import Faults
from tests.engine.helpers import null_engine, run
from tests.engine.stepping import greedy
from tests.engine.structured import GRAMMARS
from tests.engine.test_kv_across_ranks import SPEC, held, ranks
from tests.engine.test_ranks import rank_of
from tests.engine.test_restarts import opened, read, run_test
from tests.structured.test_calls import tokenizer

LIMITS: dict[str, Any] = {
    "max_num_seqs": 4,
    "block_size": 4,
    "num_kv_blocks": 24,  # too few blocks, so requests are preempted, offloaded and loaded
    "max_model_len": 80,
    "max_num_batched_tokens": 32,
    "num_threads": 1,
}
SPECS = [
    *(greedy(f"greedy-{i}", range(3 + i, 13 + 2 * i), 40) for i in range(4)),
    *(greedy(f"drawn-{i}", range(30 + i, 50), 40, temperature=1.0, seed=i, frequency_penalty=0.5) for i in range(2)),
    greedy("scored", range(9), 40, logprobs=2, prompt_logprobs=1),
    RequestSpec(
        request_id="vector", prompt=tuple(range(40)), params=SamplingParams(max_tokens=1), pooling=Pooling("mean")
    ),
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=4, vocab_size=258)


def engine_of(folder: Path, stages: int, **changes: Any) -> Engine:
    values: dict[str, Any] = {"model": "tiny", "backend": "reference", "pipeline_parallel_size": stages} | LIMITS
    return load_engine(EngineConfig(**(values | changes)), folder, progress=lambda *_: None)


@pytest.mark.parametrize(
    ("stages", "changes"),
    [
        pytest.param(2, {"backend": "cpu", "dtype": "float32"}, id="native"),
        pytest.param(3, {}, id="three"),
        pytest.param(2, {"pipeline_depth": 4}, id="deep", marks=pytest.mark.soak),
        pytest.param(2, {"pipeline_depth": 1}, id="one plan at a time", marks=pytest.mark.soak),
    ],
)
def test_stages_generate_golden_texts_under_pressure(folder: Path, stages: int, changes: dict[str, Any]) -> None:
    results = []
    for count in (1, stages):
        engine = engine_of(folder, count, **(changes if count > 1 else changes | {"pipeline_depth": None}))
        try:
            results.append(run(engine, SPECS))
            stats = engine.stats()
            assert stats.kv is not None and stats.scheduler.counters.preemptions > 0
            assert engine.probe().runner.cache.shape.num_layers == 4  # of all stages
        finally:
            engine.close()
    assert results[0].tokens == results[1].tokens and results[0].ends == results[1].ends


@pytest.mark.soak
def test_structured_output_and_logprobs_equal_single_process(tmp_path: Path) -> None:
    """Grammars force some tokens and mask others."""
    model = write_checkpoint("llama", tmp_path, num_hidden_layers=4, vocab_size=258, eos_token_id=256)
    tokenizer(("<a>",)).backend.save(str(model / "tokenizer.json"))
    specs = [
        RequestSpec(
            request_id=f"{kind}-{index}",
            prompt=tuple(range(5 + index, 20)),
            params=SamplingParams(max_tokens=40, temperature=float(index), seed=index, grammar=constraint),
            eos_token_ids=(256,),
        )
        for kind, constraint in GRAMMARS.items()
        for index in range(2)
    ]
    specs.append(greedy("scored", range(9), 40, logprobs=2, prompt_logprobs=1))
    results = []
    for count in (1, 2):
        engine = engine_of(model, count)
        try:
            results.append(run(engine, specs))
            assert engine.stats().masks.masks > 0
        finally:
            engine.close()
    one, two = results
    assert one.tokens == two.tokens and one.ends == two.ends
    for mine, other in ((two.scores, one.scores), (two.prompt_scores, one.prompt_scores)):
        assert [score.top_ids for score in mine["scored"]] == [score.top_ids for score in other["scored"]]
        np.testing.assert_allclose(
            [score.logprob for score in mine["scored"]], [score.logprob for score in other["scored"]], atol=1e-4
        )


def test_stage_waits_for_tokens_in_flight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler may plan a request's next token while the last one is in flight."""
    engine = engine_of(folder, 1)
    expected = run(engine, SPECS).tokens
    engine.close()
    monkeypatch.setattr(Planner, "_of_this_plan", lambda self, ready: ready)
    engine = engine_of(folder, 2, pipeline_depth=3)
    try:
        assert run(engine, SPECS).tokens == expected
    finally:
        engine.close()


def test_killed_stage_loses_no_token(folder: Path, faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    settings = LIMITS | {"backend": "faulty_reference", "pipeline_parallel_size": 2}
    faults.arm("hold", position=max(len(spec.prompt) for spec in SPECS) + 8)

    async def main() -> None:
        async with opened("inproc", folder, **LIMITS | {"backend": "reference"}) as client:
            expected = [(await read(client, spec)).tokens for spec in SPECS]
        async with opened(path=folder, **settings) as client:
            assert isinstance(client, ProcessClient)
            reading = asyncio.gather(*(read(client, spec) for spec in SPECS))
            await until(lambda: faults.count == 1)
            os.kill(rank_of(client), signal.SIGKILL)
            faults.release()
            results = await reading
            assert [each.tokens for each in results] == expected
            assert client.info.epoch == 2 and client.requests_requeued > 0
        assert "engine of epoch 1 died: rank 1 was ended by SIGKILL" in caplog.text

    with caplog.at_level(logging.ERROR):
        run_test(main)


def test_kv_copy_covers_blocks_of_all_stages(folder: Path) -> None:
    engine = engine_of(folder, 3)
    try:
        cache = engine.probe().runner.cache
        data = np.arange(2 * 4 * 2 * 4 * 2 * 16, dtype=np.float32).reshape(2, 4, 2, 4, 2, 16)
        cache.import_blocks(np.array([4, 2], np.int32), data)
        np.testing.assert_array_equal(cache.export_blocks(np.array([2, 4], np.int32)), data[::-1])
    finally:
        engine.close()


def test_pair_may_combine_stages_and_ranks(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"of sixteen bytes")
    secret.chmod(0o600)
    with ranks(1, folder) as engine:
        texts = run(engine, [SPEC]).tokens
    with (
        ranks(1, folder, role="prefill", pipeline_parallel_size=2, transfer_secret_file=str(secret)) as first,
        ranks(2, folder, role="decode", transfer_secret_file=str(secret)) as second,
    ):
        pair = Pair(first, second)
        pair.run(SPEC)
        assert pair.texts.tokens == texts
        assert set(pair.outcomes.values()) == {"transferred"}
        np.testing.assert_array_equal(held(first), held(second))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 2}, "cannot be combined with --tensor-parallel-size"),
        ({"speculative": SpeculativeConfig(method="ngram")}, "cannot be combined with --speculative-config"),
        ({"lora_modules": ("a=b",)}, "cannot be combined with --lora-modules"),
        ({"rank_transport": "gloo"}, "cannot be combined with --rank-transport gloo"),
        ({"distributed_executor_backend": "uni"}, "uni runs one process"),
        ({"max_num_batched_tokens": 3_000_000}, "use at most|cannot hand on"),
    ],
)
def test_settings_incompatible_with_stages_are_rejected(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_of(folder, 2, **changes).close()


def test_backend_without_stage_support_is_rejected() -> None:
    with pytest.raises(ConfigError, match="does not support pipeline stages"):
        null_engine(pipeline_parallel_size=2)
