"""Models with windows: their layers have block tables of their own, which changes neither texts nor invariants."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.errors import ConfigError
from fd_core.models.families.builtin.llama import Llama4
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.testing.models.checkpoints import SIZES, write_checkpoint, write_config
from fd_core.testing.models.texts import Texts, run
from fd_core.types import RequestSpec
from tests.engine.building.test_kv_transfer import Pair
from tests.engine.helpers import random_specs

_SLIDING, _WHOLE = "sliding_attention", "full_attention"
MODELS: Final[dict[str, tuple[str, dict[str, Any], LayerGroups]]] = {
    "mixed": ("gemma3", {"layer_types": [_SLIDING, _SLIDING, _WHOLE] * 2}, LayerGroups(1, 2, window=9)),
    "rare": ("qwen2-window", {}, LayerGroups(1, 5, window=5)),
    "all": ("mistral-window", {}, LayerGroups(0, 1, window=7)),
    "chunks": ("llama4", {"no_rope_layers": [1, 1, 0] * 2}, LayerGroups(1, 2, window=7, chunked=True)),
}
SPECS = random_specs(6, seed=3, max_prompt=80, max_tokens=35)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LayerGroups]:
    case, changes, groups = MODELS[request.param]
    folder, changes = tmp_path_factory.mktemp("windows") / request.param, changes | {"num_hidden_layers": 6}
    if case == "llama4":
        named = {"architectures": Llama4.architectures[:1], "torch_dtype": "float32", "vocab_size": 258}
        write_config(SIZES | Llama4.cases["plain"] | changes | named, folder, seed=4)
        return folder, groups
    return write_checkpoint(case, folder, vocab_size=258, **changes), groups


@contextmanager
def one_group() -> Iterator[None]:
    """Let the scheduler keep all layers in one group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContinuousBatchingScheduler, "groups_layers", False)
        yield


@contextmanager
def engine_of(folder: Path, **changes: Any) -> Iterator[Engine]:
    values: dict[str, Any] = {
        "model": str(folder),
        "backend": "reference",
        "max_num_seqs": 4,
        "block_size": 4,
        "num_kv_blocks": 2000,
        "max_model_len": 160,
        "max_num_batched_tokens": 24,
        "pipeline_depth": 2,
        "num_threads": 1,
    }
    engine = load_engine(EngineConfig(**(values | changes)), folder, progress=lambda *_: None, wake=lambda: None)
    try:
        yield engine
    finally:
        engine.close()


_TEXTS: dict[tuple[Any, ...], dict[str, list[int]]] = {}


def golden(folder: Path, **changes: Any) -> dict[str, list[int]]:
    """Return the texts that one group of all layers gives, which keeps all KV."""
    key = folder, *changes.items()
    if key not in _TEXTS:
        with one_group(), engine_of(folder, **changes) as engine:
            assert engine.info.groups == ONE_GROUP
            _TEXTS[key] = run(engine, SPECS).tokens
    return _TEXTS[key]


def crowded(groups: LayerGroups) -> int:
    """Return blocks for one long request and a part of another."""
    return groups.blocks(160, 4) + groups.blocks(50, 4)


FRAMEWORKS: Final = {"reference": "numpy", "cpu": "torch", "cpu+onnx": "onnxruntime", "cpu+paddle": "paddle"}
PACKS: Final[dict[str, dict[str, Any]]] = {
    **{name: {"backend": name} for name, framework in FRAMEWORKS.items() if find_spec(framework) is not None},
    "cpu, torch": {"backend": "cpu", "native_kernels": False},
}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.law("4")
@pytest.mark.in_turn(3)
def test_texts_do_not_change_where_blocks_are_scarce(model: tuple[Path, LayerGroups], pack: str, caching: bool) -> None:
    folder, groups = model
    scarce: dict[str, Any] = {"num_kv_blocks": crowded(groups), "enable_prefix_caching": caching}
    with engine_of(folder, dtype="float32", **PACKS[pack], **scarce) as engine:
        assert engine.info.groups == groups
        assert run(engine, SPECS).tokens == golden(folder)
        blocks = engine.stats().scheduler.blocks
        assert (blocks.used, blocks.fenced) == (0, 0)
        engine.check_integrity()


@pytest.mark.parametrize("pack", ["reference", "cpu", "cpu, torch"])
@pytest.mark.law("4")
@pytest.mark.in_turn(4)
def test_texts_with_8_bit_kv_do_not_change(model: tuple[Path, LayerGroups], pack: str) -> None:
    """In the same steps, because 8 bits show rounding errors of sums in another order."""
    folder, groups = model
    settings = PACKS[pack] | {"dtype": "float32", "kv_cache_dtype": "int8"}
    with engine_of(folder, **settings) as engine:
        assert engine.info.groups == groups
        assert run(engine, SPECS).tokens == golden(folder, **settings)


@pytest.mark.law("4")
def test_preempted_requests_with_windows_keep_their_texts(model: tuple[Path, LayerGroups]) -> None:
    folder, groups = model
    with engine_of(folder, num_kv_blocks=groups.blocks(160, 4) + 1, max_num_seqs=6) as engine:
        engine.probe().scheduler.probe().control.growth = lambda *_: 0  # type: ignore[attr-defined]  # admits what fits
        assert run(engine, SPECS).tokens == golden(folder)
        assert engine.stats().scheduler.counters.preemptions


@pytest.mark.law("4")
def test_cached_prefixes_with_windows_keep_the_texts(model: tuple[Path, LayerGroups]) -> None:
    folder, _ = model
    with engine_of(folder) as engine:
        for _ in range(2):
            assert run(engine, SPECS).tokens == golden(folder)
        hits = engine.stats().scheduler.counters.prefix_hits
        cacheable = sum((len(spec.prompt) - 1) // 4 * 4 for spec in SPECS)
        assert hits == cacheable, "a whole prompt is known as far as every group holds it"


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3)},
        {"max_num_batched_tokens": 4, "pipeline_depth": 1},
        {"block_size": 16, "max_num_batched_tokens": 160},
    ],
    ids=["drafts", "small budget", "large blocks"],
)
@pytest.mark.law("4")
@pytest.mark.slow
def test_settings_do_not_change_texts(model: tuple[Path, LayerGroups], changes: dict[str, Any]) -> None:
    folder, groups = model
    with engine_of(folder, **changes) as engine:
        assert engine.info.groups == groups
        assert run(engine, SPECS).tokens == golden(folder)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("mixed", {"tensor_parallel_size": 2, "backend": "cpu", "dtype": "float32"}),
        ("all", {"tensor_parallel_size": 2, "backend": "cpu", "dtype": "float32"}),
        ("rare", {"pipeline_parallel_size": 2, "backend": "cpu", "dtype": "float32"}),
        ("chunks", {"pipeline_parallel_size": 2, "backend": "cpu", "dtype": "float32"}),
        ("mixed", {"pipeline_parallel_size": 2, "backend": "reference", "num_kv_blocks": 130}),
        ("all", {"pipeline_parallel_size": 2, "backend": "reference", "num_kv_blocks": 130}),
    ],
    indirect=["model"],
)
@pytest.mark.law("4")
@pytest.mark.slow
@pytest.mark.in_turn(4, by=lambda model, changes: (*changes,))
def test_ranks_do_not_change_texts(model: tuple[Path, LayerGroups], changes: dict[str, Any]) -> None:
    folder, groups = model
    with engine_of(folder, **changes) as engine:
        assert engine.info.groups == groups
        assert run(engine, SPECS).tokens == golden(folder)


def test_request_holds_no_block_outside_its_windows(model: tuple[Path, LayerGroups]) -> None:
    folder, groups = model
    with engine_of(folder, pipeline_depth=1) as engine:
        engine.submit(msgspec.structs.replace(SPECS[0], prompt=tuple(range(100))))
        held = []
        while engine.has_work:
            engine.step()
            held.append(engine.stats().scheduler.blocks.used)
        chunk = groups.sliding * -(-24 // 4)
        assert max(held) <= groups.blocks(150, 4) + chunk


def wait_until_stored(engine: Engine, seconds: float = 60) -> None:
    """Wait until the KV of preempted requests is where their return looks for it."""
    deadline = time.monotonic() + seconds
    while (kv := engine.stats().kv) is not None and (kv.open_operations or kv.pending_write_bytes):
        assert time.monotonic() < deadline, f"still open: {kv}"
        time.sleep(0.001)


def run_preempted(engine: Engine, specs: list[RequestSpec]) -> Texts:
    """Return the texts of more requests than fit; those that are preempted return when their KV is stored."""
    engine.probe().scheduler.probe().control.growth = lambda *_: 0  # type: ignore[attr-defined]  # admits what fits
    texts = Texts()
    for spec in specs:
        texts.take(engine.submit(spec))
    while engine.has_work:
        texts.take(engine.step())
        wait_until_stored(engine)
    return texts


@pytest.mark.law("5.2")
@pytest.mark.parametrize("where", ["host tier", "store"])
def test_preempted_requests_go_on_from_saved_windows(
    model: tuple[Path, LayerGroups], where: str, secrets: dict[str, str], tmp_path: Path
) -> None:
    folder, groups = model
    store = {"kv_store": f"disk:{tmp_path}/kv", "host_kv_memory": 0, **secrets} if where == "store" else {}
    with engine_of(folder, num_kv_blocks=groups.blocks(160, 4) + 1, max_num_seqs=6, **store) as engine:
        texts = run_preempted(engine, SPECS)
        assert texts.tokens == golden(folder)
        counters, offload = engine.stats().scheduler.counters, engine.stats().scheduler.offload
        assert counters.preemptions and offload.saved_tokens
        assert offload.loaded_tokens or (where == "store" and not groups.whole)
        engine.check_integrity()


@pytest.mark.law("5.3")
def test_prompts_go_on_from_what_another_engine_stored(
    model: tuple[Path, LayerGroups], secrets: dict[str, str], tmp_path: Path
) -> None:
    """A prompt that continues a text finds it in groups that keep every block, and the windows at its end."""
    folder, groups = model
    settings: dict[str, Any] = {"kv_store": f"disk:{tmp_path}/kv", **secrets}
    with engine_of(folder, **settings) as engine:
        texts = run(engine, SPECS).tokens
        assert texts == golden(folder)
    longer = [
        msgspec.structs.replace(
            spec,
            prompt=(*spec.prompt, *texts[spec.request_id], 7, 8, 9),
            params=msgspec.structs.replace(spec.params, max_tokens=6),
        )
        for spec in SPECS
        if len(spec.prompt) + len(texts[spec.request_id]) < 150
    ]
    with engine_of(folder) as engine:
        right = run(engine, longer).tokens
    with engine_of(folder, **settings) as engine:
        assert run(engine, longer).tokens == right
        offload, counters = engine.stats().scheduler.offload, engine.stats().scheduler.counters
        assert offload.lost_tokens == 0
        if groups.whole:
            known = sum((len(spec.prompt) - 4) // 4 * 4 for spec in longer)
            assert offload.loaded_tokens + counters.prefix_hits >= known
        engine.check_integrity()


@pytest.mark.law("6.2")
@pytest.mark.parametrize("caching", ["cold", "half known"])
def test_pair_transfers_what_the_next_token_reads(
    model: tuple[Path, LayerGroups], caching: str, secrets: dict[str, str]
) -> None:
    folder, groups = model
    first = [msgspec.structs.replace(spec, request_id=f"{spec.request_id}-", prompt=spec.prompt[:30]) for spec in SPECS]
    with (
        engine_of(folder, role="prefill", **secrets) as prefill,
        engine_of(folder, role="decode", **secrets) as decode,
    ):
        assert prefill.info.groups == decode.info.groups == groups
        if caching != "cold":
            run(decode, first)
        pair = Pair(prefill, decode)
        pair.run(*SPECS)
        assert pair.texts.tokens == golden(folder)
        assert set(pair.outcomes.values()) <= {"transferred", "held"} and "transferred" in pair.outcomes.values()
        for engine in (prefill, decode):
            assert (engine.stats().scheduler.blocks.used, engine.stats().scheduler.blocks.fenced) == (0, 0)
            engine.check_integrity()
        longest = max(len(spec.prompt) for spec in SPECS)
        sent = prefill.stats().scheduler.transfers
        assert sent is not None
        assert sent.sent_blocks < len(SPECS) * groups.count * -(-longest // 4)


def test_pair_with_other_groups_is_refused_by_name(
    model: tuple[Path, LayerGroups], secrets: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = model
    with (
        engine_of(folder, role="prefill", **secrets) as prefill,
        one_group(),
        engine_of(folder, role="decode", **secrets) as decode,
    ):
        pair = Pair(prefill, decode)
        pair.run(SPECS[0])
        assert set(pair.outcomes.values()) == {"refused"}
    assert "layers" in caplog.text and "the prompt is computed here" in caplog.text


def test_window_beyond_the_longest_context_divides_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint("mistral-window", tmp_path / "model", sliding_window=160)
    with engine_of(folder) as engine:
        assert engine.info.groups == ONE_GROUP
    with engine_of(folder, max_model_len=161) as engine:
        assert engine.info.groups == LayerGroups(0, 1, window=160)


def test_too_few_blocks_for_the_context_are_refused_with_the_number(tmp_path: Path) -> None:
    case, changes, groups = MODELS["mixed"]
    folder = write_checkpoint(case, tmp_path / "model", num_hidden_layers=6, **changes)
    few = groups.blocks(160, 4) - 1
    with (
        pytest.raises(ConfigError, match=f"{few} KV blocks of 4 tokens for one of 3 groups of layers hold 156 tokens"),
        engine_of(folder, num_kv_blocks=few),
    ):
        pass
