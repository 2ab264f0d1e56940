"""KV written by one number of ranks and read by another: stores, requests of a lost engine, and disaggregated pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.testing.models.texts import Texts, greedy, run
from tests.engine.building.test_kv_transfer import Pair

pytestmark = pytest.mark.slow

HEADS = {
    "uneven": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},  # like SmolLM2; on two ranks 2 and 1
    "shared": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8},  # both ranks hold the same head
}
SPEC = greedy("r", range(41), 12)
BLOCKS = 10
"""Number of full blocks of the prompt."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_checkpoint("llama", folder / name, vocab_size=258, **heads) for name, heads in HEADS.items()}


@contextmanager
def ranks(size: int, path: Path, **settings: Any) -> Iterator[Engine]:
    """Run an engine of a model on ranks."""
    values: dict[str, Any] = {
        "model": "tiny",
        "backend": "reference",
        "tensor_parallel_size": size,
        "max_num_seqs": 4,
        "block_size": 4,
        "num_kv_blocks": 60,
        "max_model_len": 80,
        "max_num_batched_tokens": 32,
        "host_kv_memory": 0,  # so that resumed requests must load from a store
    }
    engine = load_engine(EngineConfig(**(values | settings)), path, progress=lambda *_: None)
    try:
        yield engine
        engine.check_integrity()
    finally:
        engine.close()


def held(engine: Engine) -> Any:
    """Return the KV of the prompt's full blocks, all heads."""
    probe = engine.probe()
    scheduler = probe.scheduler.probe()
    chain: list[bytes] = []
    hasher = scheduler.prefixes.hasher
    hasher.extend(chain, hasher.root(""), np.array(SPEC.prompt, np.int32), len(SPEC.prompt))
    blocks = scheduler.pool.match(chain)
    assert len(blocks) == BLOCKS
    return probe.runner.cache.export_blocks(blocks)


def wait_for(done: Callable[[], object], engine: Engine, texts: Texts | None = None, seconds: float = 60) -> None:
    """Step an engine until a condition holds."""
    texts = texts or Texts()
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        texts.take(engine.step())
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("model", "kv", "weights", "writes", "reads"),
    [("uneven", "auto", "auto", 1, 2), ("uneven", "int8", "int8", 2, 1), ("shared", "auto", "int8", 2, 1)],
)
def test_stored_kv_is_readable_by_any_number_of_ranks(
    model: str,
    kv: str,
    weights: str,
    writes: int,
    reads: int,
    models: dict[str, Path],
    secrets: dict[str, str],
    tmp_path: Path,
) -> None:
    """Loaded KV is bitwise equal."""
    store = {"kv_cache_dtype": kv, "quantization": weights, "kv_store": f"disk:{tmp_path / 'kv'}", **secrets}
    with ranks(writes, models[model], **store) as engine:
        texts, kept = run(engine, [SPEC]).tokens, held(engine)
        wait_for(lambda: not engine.stats().scheduler.blocks.fenced, engine)
    with ranks(reads, models[model], **store) as engine:
        assert run(engine, [SPEC]).tokens == texts
        counted = engine.stats().scheduler.offload
        assert (counted.loaded_tokens, counted.lost_tokens) == (4 * BLOCKS, 0)
        np.testing.assert_array_equal(held(engine), kept)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_requests_resume_from_stored_kv_on_other_number_of_ranks(
    before: int, after: int, models: dict[str, Path], secrets: dict[str, str], tmp_path: Path
) -> None:
    """As after a restart: the first engine preempts for lack of blocks and ends before any request does."""
    specs = [greedy(f"r{index}", range(3 + index, 16 + 2 * index), 50) for index in range(4)]
    with ranks(1, models["uneven"]) as engine:
        texts = run(engine, specs).tokens
    store = {"kv_store": f"disk:{tmp_path / 'kv'}", **secrets}
    earlier = Texts()
    with ranks(before, models["uneven"], **store, num_kv_blocks=24) as engine:
        for spec in specs:
            earlier.take(engine.submit(spec))
        while engine.stats().scheduler.counters.preemptions < 2:
            earlier.take(engine.step())
        assert not earlier.ends
        wait_for(lambda: engine.stats().kv.written_blocks, engine, earlier)  # type: ignore[union-attr]  # it has a store
    delivered = [
        msgspec.structs.replace(spec, delivered=tuple(earlier.tokens.get(spec.request_id, ()))) for spec in specs
    ]
    with ranks(after, models["uneven"], **store) as engine:
        rest = run(engine, delivered)
        assert engine.stats().scheduler.offload.loaded_tokens
    assert {name: earlier.tokens.get(name, []) + tokens for name, tokens in rest.tokens.items()} == texts


@pytest.mark.parametrize(("prefill", "decode", "kv"), [(2, 1, "auto"), (1, 2, "int8")])
def test_pair_may_have_different_numbers_of_ranks(
    prefill: int, decode: int, kv: str, models: dict[str, Path], secrets: dict[str, str]
) -> None:
    settings = {"kv_cache_dtype": kv, **secrets}
    with ranks(1, models["uneven"], kv_cache_dtype=kv) as engine:
        texts = run(engine, [SPEC]).tokens
    with (
        ranks(prefill, models["uneven"], role="prefill", **settings) as first,
        ranks(decode, models["uneven"], role="decode", **settings) as second,
    ):
        pair = Pair(first, second)
        pair.run(SPEC)
        assert pair.texts.tokens == texts
        assert set(pair.outcomes.values()) == {"transferred"}
        np.testing.assert_array_equal(held(first), held(second))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"kv_cache_dtype": "int8"}, "the dtype of the KV is float32 at the prefill worker and int8"),
        ({"block_size": 8}, "--block-size is 4 at the prefill worker and 8"),
    ],
)
def test_pair_rejects_other_incompatibilities_by_name(
    other: dict[str, Any],
    expected: str,
    models: dict[str, Path],
    secrets: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        ranks(2, models["uneven"], role="prefill", **secrets) as first,
        ranks(1, models["uneven"], role="decode", **secrets, **other) as second,
    ):
        pair = Pair(first, second)
        pair.run(SPEC)
        assert pair.outcomes == {"r": "refused"}
    assert expected in caplog.text
