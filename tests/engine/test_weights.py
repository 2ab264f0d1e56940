"""Weights replaced or released in a running engine: texts, prefixes and saved KV of different versions never mix."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.engine.process import messages
from fd_core.engine.ranks import messages as rank_messages
from fd_core.engine.ranks.leading import LeadingRunner
from fd_core.errors import BadRequest, EngineDead, FdError, ModelError
from fd_core.ops.native.memory import Arena
from fd_core.runner.runner import Runner
from fd_core.testing.models.adapters import write_adapter
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.testing.models.drafting import speculation
from fd_core.testing.models.texts import Texts, greedy, run
from fd_core.types import RequestSpec, SamplingParams
from tests.engine.building.test_kv_transfer import Pair, at_rest, secret
from tests.engine.test_control import finish, ordered
from tests.engine.test_ranks import scripted_ranks

__all__ = ["secret"]

SHARED = range(3, 19)
SPECS = [
    *(greedy(f"greedy-{index}", (*SHARED, index), 24) for index in range(3)),
    *(
        RequestSpec(
            request_id=f"sampled-{index}",
            prompt=(*SHARED, 40 + index),
            params=SamplingParams(max_tokens=24, temperature=0.9, seed=index, prompt_logprobs=0),
        )
        for index in range(3)
    ),
]


BOTH: list[dict[str, Any]] = [{"tensor_parallel_size": 2, "pipeline_depth": 2}, {"pipeline_parallel_size": 2}]
RANKS = [pytest.param(settings, marks=pytest.mark.slow) for settings in BOTH]
TENSOR_RANKS, STAGES = (
    [pytest.param(each, marks=pytest.mark.slow if each == chosen else pytest.mark.soak) for each in BOTH]
    for chosen in BOTH
)
"""Both kinds of ranks, of which the default run takes one: all get the same orders."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    shutil.copytree(write_checkpoint("llama", folder / "one", vocab_size=258), folder / "two")
    tensors = load_file(folder / "one" / "model.safetensors")
    save_file(
        {name: np.ascontiguousarray(np.roll(each, 1, axis=0)) for name, each in tensors.items()},
        folder / "two" / "model.safetensors",
        metadata={"format": "pt"},
    )
    shutil.copytree(folder / "one", folder / "again")
    write_checkpoint("llama", folder / "wider", vocab_size=259)
    write_checkpoint("llama", folder / "deeper", vocab_size=258, num_hidden_layers=4)
    write_adapter(folder / "one", folder / "adapter", seed=1)
    return folder


def engine_of(folder: Path, **settings: Any) -> Engine:
    values: dict[str, Any] = {"model": "tiny", "backend": "reference", "max_model_len": 80, "block_size": 4}
    values |= {"num_kv_blocks": 60, "max_num_seqs": 4, "max_num_batched_tokens": 32, "structured_output": False}
    return load_engine(EngineConfig(**(values | settings)), folder, progress=lambda *_: None)


EXPECTED: dict[str, Texts] = {}
"""By folder, requests and settings."""


def texts_of(folder: Path, specs: list[RequestSpec], **settings: Any) -> Texts:
    """Return the texts of another engine, without ranks: tests/engine/test_ranks.py shows that these change no text.

    Computed once for all tests of this file. Do not modify them.
    """
    alone = {name: value for name, value in settings.items() if not name.endswith("_parallel_size")}
    if (key := repr((folder, specs, alone))) not in EXPECTED:
        engine = engine_of(folder, **alone)
        try:
            EXPECTED[key] = run(engine, specs)
        finally:
            engine.close()
    return EXPECTED[key]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pipeline_depth": 2},
        {"enable_prefix_caching": False},
        {"host_kv_memory": 0},
        {"num_kv_blocks": 24},
        {"speculative": speculation(3)},
        {"backend": "cpu", "dtype": "float32"},
        pytest.param({"backend": "cpu", "dtype": "float32", "native_kernels": False}, marks=pytest.mark.soak),
        *RANKS,
    ],
    ids=str,
)
def test_requests_continue_with_the_new_weights_alone(folder: Path, settings: dict[str, Any]) -> None:
    """Tokens from the update on equal those of an engine that had the new weights all along."""
    engine, texts = engine_of(folder / "one", **settings), Texts()
    before = texts_of(folder / "one", SPECS, **settings)
    for spec in SPECS:
        texts.take(engine.submit(spec))
    for _ in range(12):
        texts.take(engine.step())
    delivered: dict[str, tuple[int, ...]] = {}

    def updated(error: FdError | None) -> None:
        assert error is None
        delivered.update({spec.request_id: tuple(texts.tokens.get(spec.request_id, ())) for spec in SPECS})

    engine.control(messages.UpdateWeights(str(folder / "two")), updated)
    while not delivered:
        texts.take(engine.step())
    assert engine.info.weight_version == "1"
    assert any(delivered.values())
    finish(engine, texts)
    resumed = [msgspec.structs.replace(spec, delivered=delivered[spec.request_id]) for spec in SPECS]
    after = texts_of(folder / "two", resumed, **settings)
    for spec in SPECS:
        name, begun = spec.request_id, delivered[spec.request_id]
        assert list(begun) == before.tokens[name][: len(begun)]
        assert texts.tokens[name] == [*begun, *after.tokens[name]]
        if spec.params.prompt_logprobs is not None and not begun:
            found, expected = (each.prompt_scores[name] for each in (texts, after))
            assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    assert texts.tokens != before.tokens
    again = [msgspec.structs.replace(spec, request_id=f"again-{spec.request_id}") for spec in SPECS]
    assert run(engine, again).tokens == texts_of(folder / "two", again, **settings).tokens
    engine.check_integrity()
    engine.close()


def test_paused_requests_recompute_their_saved_kv(folder: Path) -> None:
    engine, texts = engine_of(folder / "one"), Texts()
    for spec in SPECS[:3]:
        texts.take(engine.submit(spec))
    for _ in range(10):
        texts.take(engine.step())
    ordered(engine, messages.PauseGeneration(), texts)
    ordered(engine, messages.ResetPrefixCache(), texts)
    assert engine.stats().scheduler.blocks.cached == 0
    ordered(engine, messages.UpdateWeights(str(folder / "two"), "step-7"), texts)
    assert (engine.info.paused, engine.info.weight_version) == (True, "step-7")
    ordered(engine, messages.ResumeGeneration(), texts)
    finish(engine, texts)
    assert engine.stats().scheduler.offload.loads == 0
    engine.close()


@pytest.mark.parametrize("settings", [{}, pytest.param(BOTH[0], marks=pytest.mark.soak)], ids=str)
def test_stored_kv_of_other_weights_is_never_loaded(
    folder: Path, tmp_path: Path, secret: str, settings: dict[str, Any]
) -> None:
    settings = settings | {"kv_store": f"disk:{tmp_path / 'kv'}", "kv_store_secret_file": secret, "host_kv_memory": 0}
    old, new = (texts_of(folder / name, SPECS[:2]).tokens for name in ("one", "two"))
    engine = engine_of(folder / "one", **settings)
    assert run(engine, SPECS[:2]).tokens == old
    assert ordered(engine, messages.UpdateWeights(str(folder / "two")), Texts()) is None
    assert run(engine, SPECS[:2]).tokens == new
    assert engine.stats().scheduler.offload.loads == 0
    engine.close()  # completes the writes
    for name, tokens, loads in (("two", new, False), ("one", old, True)):
        later = engine_of(folder / name, **settings)
        assert run(later, SPECS[:2]).tokens == tokens
        assert (later.stats().scheduler.offload.loads > 0) == loads
        later.close()


def test_reset_keeps_texts_and_recomputes_prompts(folder: Path) -> None:
    engine, texts = engine_of(folder / "one"), Texts()
    first = run(engine, SPECS[:1]).tokens
    assert engine.stats().scheduler.blocks.cached > 0
    assert ordered(engine, messages.ResetPrefixCache(), texts) is None
    assert engine.stats().scheduler.blocks.cached == 0
    again = msgspec.structs.replace(SPECS[0], request_id="again")
    assert [*run(engine, [again]).tokens.values()] == [*first.values()]
    assert engine.stats().scheduler.counters.prefix_hits == 0
    engine.close()


@pytest.mark.parametrize("settings", [{}, pytest.param(BOTH[0], marks=pytest.mark.soak)], ids=str)
def test_adapters_apply_to_the_new_weights_also_after_a_sleep(folder: Path, settings: dict[str, Any]) -> None:
    settings = {"lora_modules": (f"style={folder / 'adapter'}",), **settings}
    engine, other = (engine_of(folder / name, **settings) for name in ("one", "two"))
    spec = msgspec.structs.replace(SPECS[0], adapter=engine.info.adapters[0].digest)
    assert ordered(engine, messages.UpdateWeights(str(folder / "two")), Texts()) is None
    expected = run(other, [spec]).tokens
    assert run(engine, [spec]).tokens == expected
    assert ordered(engine, messages.Sleep(2), Texts()) is None
    assert ordered(engine, messages.WakeUp(), Texts()) is None
    assert run(engine, [spec]).tokens == expected
    for each in (engine, other):
        each.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [("wider", "vocab_size is 259, but the served model has 258"), ("deeper", "num_parameters"), ("none", "none")],
)
def test_other_shapes_are_refused_and_change_nothing(folder: Path, name: str, words: str) -> None:
    engine, texts = engine_of(folder / "one"), Texts()
    error = ordered(engine, messages.UpdateWeights(str(folder / name)), texts)
    assert isinstance(error, ModelError) and words in str(error)
    assert engine.info.weight_version == "0"
    assert run(engine, SPECS).tokens == texts_of(folder / "one", SPECS).tokens
    engine.close()


@pytest.mark.slow
@pytest.mark.in_turn(4)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "words"), [("wider", "vocab_size is 259"), ("none", "none"), ("two", "the ranks read different weights")]
)
def test_update_that_fails_on_one_rank_changes_no_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, name: str, words: str
) -> None:
    engine, texts = engine_of(folder / "one", tensor_parallel_size=2), Texts()
    encode_order, good, bad = rank_messages.encode_order, str(folder / "again"), str(folder / name)

    def encoded(order: rank_messages.RankOrder) -> bytes:
        if isinstance(order, rank_messages.ChangeModel) and order.path:
            order = msgspec.structs.replace(order, path=good if rank == 0 else bad)
        return encode_order(order)

    with monkeypatch.context() as patch:
        patch.setattr(rank_messages, "encode_order", encoded)
        error = ordered(engine, messages.UpdateWeights(bad if rank == 0 else good), texts)
    assert isinstance(error, ModelError) and words in str(error)
    assert ("rank 1: " in str(error)) == (rank == 1 and name != "two")
    assert run(engine, SPECS[:2]).tokens == texts_of(folder / "one", SPECS[:2]).tokens
    assert ordered(engine, messages.UpdateWeights(str(folder / "two")), texts) is None
    again = [msgspec.structs.replace(spec, request_id=f"again-{spec.request_id}") for spec in SPECS[:2]]
    assert run(engine, again).tokens == texts_of(folder / "two", again).tokens
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, *STAGES], ids=str)
def test_half_finished_update_stops_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    engine = engine_of(folder / "one", **settings)

    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Runner, "_compile", fails)
    with pytest.raises(EngineDead, match="the new weights could not be used: MemoryError: no room"):
        ordered(engine, messages.UpdateWeights(str(folder / "two")), Texts())
    engine.close()


@pytest.mark.slow
def test_update_half_finished_on_another_rank_stops_the_engine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "from fd_core.engine.ranks import child\n"
        "from fd_core.runner.runner import Runner\n"
        "Runner.replace_model = lambda self, model: 1 / 0\n"
        "child.main()"
    )
    scripted_ranks(script, tmp_path, monkeypatch)
    engine = engine_of(folder / "one", tensor_parallel_size=2)
    with pytest.raises(EngineDead, match="rank 1: the new weights could not be used: ZeroDivisionError"):
        ordered(engine, messages.UpdateWeights(str(folder / "two")), Texts())
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("settings", STAGES, ids=str)
@pytest.mark.parametrize("order", [messages.UpdateWeights("two"), messages.Sleep(), messages.WakeUp()], ids=str)
def test_rank_lost_before_an_order_stops_the_engine(
    folder: Path, settings: dict[str, Any], order: messages.ControlOrder
) -> None:
    engine = engine_of(folder / "one", **settings)
    if isinstance(order, messages.WakeUp):
        ordered(engine, messages.Sleep(), Texts())
    runner = engine.probe().runner
    assert isinstance(runner, LeadingRunner)
    os.kill(runner.ranks.pids[0], signal.SIGKILL)
    with pytest.raises(EngineDead, match="rank 1 was ended by SIGKILL"):
        ordered(engine, order, Texts())
    engine.close()


PROMPTS = [greedy(f"long-{index}", range(9 * index, 9 * index + 40), 12) for index in range(12)]


@contextmanager
def pair_of(folder: Path, secret: str, **settings: Any) -> Iterator[Pair]:
    both = {"transfer_secret_file": secret, "lease_seconds": 5.0, **settings}
    two = Pair(engine_of(folder, role="prefill", **both), engine_of(folder, role="decode", **both))
    try:
        yield two
        two.until(lambda: at_rest(two))
    finally:
        two.prefill.close()
        two.decode.close()


def give(two: Pair, engine: Engine, order: messages.ControlOrder) -> None:
    results: list[FdError | None] = []
    engine.control(order, results.append)
    two.until(lambda: bool(results))
    assert results == [None]


@pytest.mark.parametrize(
    ("first", "settings"),
    [
        ("prefill", {}),
        ("decode", {}),
        *(
            pytest.param(side, ranks, marks=pytest.mark.soak if side == "prefill" else pytest.mark.slow)
            for side, ranks in zip(["prefill", "decode"], BOTH, strict=True)
        ),
    ],
    ids=str,
)
def test_pair_exchanges_no_kv_of_other_weights(
    folder: Path, secret: str, first: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Between the updates of its workers a prompt is computed where it is decoded, with the weights there."""
    old, new = (texts_of(folder / name, PROMPTS).tokens for name in ("one", "two"))
    before, begun, between, after = (PROMPTS[index : index + 3] for index in range(0, 12, 3))
    with pair_of(folder / "one", secret, **settings) as two:
        order = messages.UpdateWeights(str(folder / "two"))
        one, other = (two.prefill, two.decode) if first == "prefill" else (two.decode, two.prefill)
        two.run(*before)
        two.submit(*begun)
        two.until(lambda: two.decode.holdings().loading > 0)
        give(two, one, order)
        two.until(lambda: not (two.decode.has_work or two.prefill.has_work))
        two.run(*between)
        give(two, other, order)
        two.run(*after)
    names = [[spec.request_id for spec in specs] for specs in (before, between, after)]
    outcomes = [{two.outcomes[name] for name in group} for group in names]
    assert outcomes == [{"transferred"}, {"refused"}, {"transferred"}]
    assert "the version of the weights differs between the prefill and the decode worker" in caplog.text
    served = (old, old if first == "prefill" else new, new)
    assert [[two.texts.tokens[name] for name in group] for group in names] == [
        [weights[name] for name in group] for weights, group in zip(served, names, strict=True)
    ]
    if first == "prefill":
        assert all(two.texts.tokens[spec.request_id] == old[spec.request_id] for spec in begun)


@pytest.mark.parametrize("order", [messages.PauseGeneration(), messages.Sleep(1), messages.Sleep(2)], ids=str)
def test_pair_may_stop_as_a_whole_while_a_prompt_is_transferred(
    folder: Path, secret: str, order: messages.ControlOrder
) -> None:
    """A prefill worker that has stopped keeps no decode worker waiting for it."""
    expected = texts_of(folder / "one", PROMPTS[:5]).tokens
    with pair_of(folder / "one", secret) as two:
        two.submit(*PROMPTS[:2])
        two.until(lambda: two.decode.stats().scheduler.slots.loading > 0)
        give(two, two.prefill, order)
        give(two, two.decode, order)
        two.submit(*PROMPTS[2:4])
        for _ in range(10):
            two.turn()
        assert two.decode.holdings().loading == 0
        for engine in (two.decode, two.prefill):
            give(two, engine, messages.WakeUp())
            give(two, engine, messages.ResumeGeneration())
            two.until(lambda: not two.decode.has_work)
        assert two.outcomes["long-2"] == two.outcomes["long-3"] == "refused"
        two.run(PROMPTS[4])
    assert two.texts.tokens == expected and two.outcomes["long-4"] == "transferred"


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pipeline_depth": 2},
        {"host_kv_memory": 0},
        {"speculative": speculation(3)},
        {"backend": "cpu", "dtype": "float32"},
        *STAGES,
    ],
    ids=str,
)
@pytest.mark.in_turn(4)
def test_texts_equal_those_without_a_sleep(folder: Path, level: int, settings: dict[str, Any]) -> None:
    engine, texts = engine_of(folder / "one", **settings), Texts()
    for spec in SPECS:
        texts.take(engine.submit(spec))
    for _ in range(8):
        texts.take(engine.step())
    cache = weakref.ref(engine.probe().runner.cache)
    for _ in range(2):
        assert ordered(engine, messages.Sleep(level), texts) is None
        assert cache() is None and engine.info.sleep_level == level and not engine.has_work
    assert ordered(engine, messages.ResumeGeneration(), texts) is None
    assert not engine.has_work
    assert ordered(engine, messages.WakeUp(), texts) is None
    finish(engine, texts)
    assert texts.tokens == texts_of(folder / "one", SPECS, **settings).tokens
    engine.close()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("settings", [{}, *TENSOR_RANKS], ids=str)
def test_weights_may_be_updated_during_a_sleep(folder: Path, level: int, settings: dict[str, Any]) -> None:
    engine, texts = engine_of(folder / "one", **settings), Texts()
    ordered(engine, messages.Sleep(level), texts)
    assert isinstance(ordered(engine, messages.ChangeAdapters("a", "/a"), texts), BadRequest)
    assert isinstance(ordered(engine, messages.UpdateWeights(str(folder / "wider")), texts), ModelError)
    assert ordered(engine, messages.UpdateWeights(str(folder / "two")), texts) is None
    assert ordered(engine, messages.WakeUp(), texts) is None
    assert run(engine, SPECS).tokens == texts_of(folder / "two", SPECS).tokens
    engine.close()


@pytest.mark.parametrize("settings", [{}, *TENSOR_RANKS], ids=str)
def test_failed_wake_up_leaves_the_engine_asleep(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    path = Path(shutil.copytree(folder / "one", tmp_path / "copy"))
    engine, texts = engine_of(path, **settings), Texts()
    ordered(engine, messages.Sleep(2), texts)
    path.rename(tmp_path / "moved")
    assert isinstance(ordered(engine, messages.WakeUp(), texts), ModelError)
    shutil.copytree(folder / "two", path)
    error = ordered(engine, messages.WakeUp(), texts)
    assert isinstance(error, ModelError) and "was changed during the sleep" in str(error)
    assert engine.info.sleep_level == 2
    shutil.rmtree(path)
    (tmp_path / "moved").rename(path)
    assert ordered(engine, messages.WakeUp(), texts) is None
    assert run(engine, SPECS).tokens == texts_of(path, SPECS).tokens
    engine.close()


def test_memory_of_replaced_weights_is_freed(folder: Path) -> None:
    engine, texts = engine_of(folder / "one", backend="cpu", dtype="float32"), Texts()
    arenas = []
    for order in (messages.UpdateWeights(str(folder / "two")), messages.Sleep(2)) * 2:
        ordered(engine, order, texts)
        ordered(engine, messages.WakeUp(), texts)
        gc.collect()
        arenas.append(sum(isinstance(each, Arena) for each in gc.get_objects()))
    assert len(set(arenas)) == 1
    engine.close()
