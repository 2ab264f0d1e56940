"""Every architecture traced into a graph, compared with the numpy forward, and through the engine."""

from __future__ import annotations

import logging
from dataclasses import replace

import gguf
import numpy as np
import pytest

from fd_core.backends.onnx import OnnxBackend
from fd_core.config import EngineConfig
from fd_core.errors import ConfigError
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.onnx_graph.pack import OnnxOps, SessionForward
from fd_core.testing.models.arrays import step_input
from tests.models.loading.tiny_gguf import llama_tensors, write_gguf
from tests.models.paged import PagedDriver
from tests.models.test_draft_model_packs import engine, specs, texts
from tests.models.tiny import CASES

# Whole and chunked prefill, decode, both mixed, and drafts: (row, tokens) of each step.
STEPS = [
    [(0, 7)],
    [(1, 5), (2, 1)],
    [(0, 1), (1, 6), (2, 3)],
    [(0, 1), (1, 1), (2, 1)],
    [(0, 4), (1, 4), (2, 4)],
    [(0, 1), (2, 6), (1, 4), (3, 12)],
]


def loaded(folder, ops):
    with open_checkpoint(folder) as checkpoint:
        return load_model(checkpoint, ops, 64)


def driver(folder, ops):
    model = loaded(folder, ops)
    prompts = np.random.default_rng(2).integers(0, model.vocab_size, (4, 30)).tolist()
    return PagedDriver(model, ops, prompts, 32)


@pytest.mark.parametrize("case", CASES)
def test_graph_equals_numpy_forward(tiny, case: str) -> None:
    expected, traced = driver(tiny(case).folder, NumpyOps()), driver(tiny(case).folder, OnnxOps())
    for work in STEPS:
        for each in (expected, traced):
            each.step(work)
    for found, row in zip(traced.rows, expected.rows, strict=True):
        np.testing.assert_allclose(np.stack(found.logits), np.stack(row.logits), rtol=1e-4, atol=1e-4)
    blocks = np.unique(expected.tables)
    kv = [each.cache.export_blocks(blocks) for each in (expected, traced)]
    np.testing.assert_allclose(kv[1], kv[0], rtol=1e-4, atol=1e-4)
    # One graph served all those shapes.
    assert isinstance(traced.forward, SessionForward)
    assert len(traced.forward._sessions) == 1
    assert not traced.forward._eager


def test_packed_weights_and_tables_are_dequantized(tmp_path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    tensors = llama_tensors()
    packed = {name: (gguf.quants.quantize(each, kind), kind) for name, each in tensors.items() if each.ndim == 2}
    path = write_gguf(tmp_path / "packed.gguf", tensors={**tensors, **packed})
    assert {use.computed for use in loaded(path, NumpyOps()).weights} == {"Q8_0"}
    assert {use.computed for use in loaded(path, OnnxOps()).weights} == {"float32"}
    found, expected = driver(path, OnnxOps()), driver(path, NumpyOps())
    for each in (found, expected):
        each.step([(0, 7), (1, 3)])
    logits = [np.stack(each.rows[0].logits) for each in (found, expected)]
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)


def test_exported_kv_is_usable_in_other_blocks(tiny) -> None:
    folder = tiny("gemma3").folder
    first, second = driver(folder, OnnxOps()), driver(folder, OnnxOps())
    first.step([(0, 11)])
    used = first.tables[:, 0, :3].ravel()
    elsewhere = second.tables[:, 2, [5, 1, 3]].ravel()
    second.tables[:, 0, :3] = elsewhere.reshape(-1, 3)
    second.cache.import_blocks(elsewhere, first.cache.export_blocks(used))
    np.testing.assert_array_equal(second.cache.export_blocks(elsewhere), first.cache.export_blocks(used))
    second.rows[0].computed = 11
    for each in (first, second):
        each.step([(0, 1)])
    np.testing.assert_array_equal(second.rows[0].logits[0], first.rows[0].logits[-1])


def test_step_without_logits_and_two_caches(tiny) -> None:
    ops = OnnxOps()
    model = loaded(tiny("llama").folder, ops)
    forward = ops.compile(model.forward)
    caches = [ops.allocate_kv(model.kv_shape(4), size) for size in (6, 9)]
    tables = np.array([[3, 1]], np.int32)
    step = step_input([(5, 5)], 4, tables)
    assert forward(replace(step, logits_rows=np.empty(0, np.int32)), caches[0]).shape == (0, model.vocab_size)
    assert caches[0].export_blocks(tables[0]).any()
    assert not caches[1].export_blocks(np.arange(9)).any()
    np.testing.assert_array_equal(forward(step, caches[1]), forward(step, caches[0]))
    assert len(forward._sessions) == 1


def test_data_dependent_forward_runs_eagerly_with_a_warning(tiny, caplog) -> None:
    ops = OnnxOps()
    model = loaded(tiny("qwen3-moe").folder, ops)

    def curious(step, cache):
        return model.forward(step, cache) if step.max_query > 0 else None

    step = step_input([(3, 3), (1, 1)], 4, np.array([[0, 1], [2, 3]], np.int32))
    caches = [ops.allocate_kv(model.kv_shape(4), 4) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        eager = ops.compile(curious)(step, caches[0])
    assert "slower" in caplog.text
    np.testing.assert_allclose(eager, ops.compile(model.forward)(step, caches[1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_texts_survive_preemption_and_speculation(tiny, k: int) -> None:
    requests = specs(temperature=1.0)
    onnx = {"backend": "cpu+onnx"}
    plain = texts(engine(tiny("llama").folder, None, "numpy", **onnx), requests)
    assert plain.tokens == texts(engine(tiny("llama").folder, None, "numpy"), requests).tokens
    pressed = engine(tiny("llama").folder, tiny("qwen2").folder, "numpy", k, num_kv_blocks=26, **onnx)
    assert texts(pressed, requests, eager=True).tokens == plain.tokens
    stats = pressed.stats()
    assert stats.scheduler.counters.preemptions > 0
    assert stats.scheduler.drafts.proposed > stats.scheduler.drafts.accepted


def test_model_drafting_for_itself_has_full_acceptance(tiny) -> None:
    folder = tiny("ernie-moe").folder
    drafting = engine(folder, folder, "numpy", 3, backend="cpu+onnx")
    assert texts(drafting, specs()).tokens == texts(engine(folder, None, "numpy"), specs()).tokens
    stats = drafting.stats()
    assert stats.scheduler.drafts.accepted == stats.scheduler.drafts.proposed > 0


def test_backend_is_float32_and_reports_its_device() -> None:
    assert OnnxBackend.probe().available
    with pytest.raises(ConfigError, match="computes in float32, got bfloat16"):
        OnnxBackend(EngineConfig(model="m", dtype="bfloat16")).make_ops()
    backend = OnnxBackend(EngineConfig(model="m", num_threads=3))
    assert backend.make_ops().name == "onnx"
    assert backend.describe() == "CPU, 3 threads, ONNX Runtime"
    assert backend.free_memory() > 0


def test_missing_packages_are_named(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = OnnxBackend.probe()
    assert not found.available
    assert "onnx and onnxruntime not installed; pip install 'fd-core[onnx]'" in found.reason
