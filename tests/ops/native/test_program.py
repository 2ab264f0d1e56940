import gc
import logging
import weakref

import numpy as np
import pytest

from fd_core.ops.contract import KVShape
from fd_core.ops.native.program import NO_STEP, CaptureError, ProgramRecorder
from tests.ops.native.layers import Geometry, LayerOn
from tests.ops.packs import raw


def model_on(layer):
    """Return a forward of two layers with the same weights, and logits."""
    ops = layer.ops
    rng = np.random.default_rng(0)
    table = ops.prepare_embedding(raw(rng.standard_normal((4, layer.g.hidden)).astype(np.float32)))
    head = ops.prepare_linear([raw(rng.standard_normal((200, layer.g.hidden)).astype(np.float32))])

    def forward(step, cache):
        x = ops.embedding(table, step.token_ids)
        for index in range(2):
            q = ops.attention_inputs(x, layer.norm, layer.qkv, layer.heads, cache.layer(index), step)
            a = ops.attention(q, layer.heads, cache.layer(index), step)
            x = ops.project_residual(a, layer.output, x, layer.post_norm)
            inner = ops.mlp_inputs(x, layer.norm, layer.gate_up, "silu")
            x = ops.project_residual(inner, layer.down, x)
        return ops.logits(x, layer.norm, head, step.logits_rows, 30.0)

    return forward


def test_packed_weights_are_multiplied_by_tiles_where_plain_ones_are(native):
    ops = native("bfloat16")
    assert ("amx" in ops.packed_products) == ("amx" in ops.instruction_set)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_forward_equals_eager_operations(native, dtype, threads):
    layer = LayerOn(native(dtype, threads), Geometry(post_norm=True))
    forward = model_on(layer)
    once = layer.ops.to_host(forward(layer.step, layer.cache))
    compiled = layer.ops.compile(forward)
    for _ in range(2):
        replayed = layer.ops.to_host(compiled(layer.step, layer.cache))
        # The softcap uses numpy's tanh in one and the kernels' tanh in the other.
        np.testing.assert_allclose(replayed, once, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_forward_serves_with_and_without_adapters(native, dtype, caplog):
    plain, adapted = (LayerOn(native(dtype, 2), Geometry(adapter_ranks=ranks)) for ranks in ((), (5, 8)))
    ops, layers = plain.ops, {False: plain, True: adapted}

    def forward_of(layer):
        def forward(step, cache):
            layer.step = step
            (qkv, output, gate_up, down), kv = layer.loras(), cache.layer(1)
            x = ops.embedding(table, step.token_ids)
            q = ops.attention_inputs(x, layer.norm, layer.qkv, layer.heads, kv, step, qkv)
            x = ops.project_residual(ops.attention(q, layer.heads, kv, step), layer.output, x, None, output)
            inner = ops.mlp_inputs(x, layer.norm, layer.gate_up, "silu", gate_up)
            x = ops.project_residual(inner, layer.down, x, None, down)
            return ops.logits(x, layer.norm, head, step.logits_rows)

        return forward

    rng = np.random.default_rng(0)
    table = ops.prepare_embedding(raw(rng.standard_normal((4, plain.g.hidden)).astype(np.float32)))
    head = ops.prepare_linear([raw(rng.standard_normal((200, plain.g.hidden)).astype(np.float32))])
    steps = {name: layer.step for name, layer in layers.items()}
    compiled = ops.compile_adapted(forward_of(adapted))
    once = ops.to_host(forward_of(adapted)(steps[True], adapted.cache))
    unadapted = ops.to_host(ops.compile(forward_of(plain))(steps[False], plain.cache)).copy()
    for _ in range(2):
        with_adapters = ops.to_host(compiled(steps[True], adapted.cache))
        np.testing.assert_allclose(with_adapters, once, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(ops.to_host(compiled(steps[False], adapted.cache)), unadapted)
    assert np.abs(once - unadapted).max() > 0.1
    assert not caplog.records


def test_unrecordable_forward_runs_eagerly_with_a_warning(native, caplog):
    layer = LayerOn(native(), Geometry())
    ops = layer.ops
    x = ops.from_host(layer.x)

    def forward(step, cache):
        return ops.linear(x * (1 + 0 * step.positions[0]), layer.qkv)

    compiled = ops.compile(forward)
    with caplog.at_level(logging.WARNING):
        results = [ops.to_host(compiled(layer.step, layer.cache)) for _ in range(2)]
    np.testing.assert_array_equal(*results)
    assert [record.message for record in caplog.records] == [
        "this model runs operation by operation, which is slower: "
        "the forward uses elements of an array, which only eager packs support"
    ]


def test_logits_never_share_a_buffer_with_activations(native):
    """Even at equal widths: a step has fewer logit rows than tokens."""
    recorder = ProgramRecorder(native().runtime)
    buffer, symbol = recorder.output(None, 64, True)
    del symbol
    logits, result = recorder.output(None, 64, True, "logits")
    again, _ = recorder.output(None, 64, True)
    assert logits != buffer == again
    with pytest.raises(CaptureError, match="unsupported array"):
        recorder.input(result, 64, True)


def test_step_exceeding_bound_memory_is_rejected(native):
    ops = native()
    recorder = ProgramRecorder(ops.runtime)
    buffer, _ = recorder.output(None, 64, True)
    recorder.bind(buffer, ops.runtime.matrix(3, 64, True))
    with pytest.raises(IndexError, match="rows of a step: 4 exceeds 3"):
        recorder.run(NO_STEP, 4)
    with pytest.raises(IndexError, match="columns of a buffer: 64 exceeds 32"):
        recorder.bind(buffer, np.zeros((3, 32), np.float32))


def test_cache_with_recorded_program_is_freed(native):
    layer = LayerOn(native(), Geometry())
    compiled = layer.ops.compile(model_on(layer))
    compiled(layer.step, layer.cache)
    freed = weakref.ref(layer.cache)
    del layer.cache, layer.kv
    gc.collect()
    assert freed() is None


def test_oversized_cache_is_a_memory_error(native):
    with pytest.raises(MemoryError, match="KV cache of 1000000000 blocks"):
        native().allocate_kv(KVShape(30, 8, 128, 32), 10**9)
