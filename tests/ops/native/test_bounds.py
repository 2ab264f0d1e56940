"""Indexes passed to the kernels: one out of range is a named error, not a stray memory access."""

from dataclasses import replace

import numpy as np
import pytest

from fd_core.runner.inputs.inputs import adapter_rows
from fd_core.testing.models.arrays import on_device, penalty_input, sample_input
from tests.ops.native.layers import Geometry, LayerOn
from tests.ops.native.test_program import model_on

FIELDS = {
    "token_ids": ("token id", 4),
    "positions": ("position", None),
    "kv_slots": ("KV slot", None),
    "logits_rows": ("row of logits", None),
    "block_tables": ("KV block", None),
    "query_start": ("end of a row|start of a row|tokens of a row", None),
    "context_len": ("context of a row|tokens of a row", None),
}


@pytest.fixture
def layer(native):
    return LayerOn(native(threads=2), Geometry())


@pytest.mark.parametrize("value", [-(2**31), -1, 2**20, 2**31 - 1])
@pytest.mark.parametrize("field", FIELDS)
def test_step_with_index_out_of_range_is_rejected(layer, field, value):
    forward, step = layer.ops.compile(model_on(layer)), layer.step
    right = layer.ops.to_host(forward(step, layer.cache)).copy()
    wrong = getattr(step, field).copy()
    wrong.reshape(-1)[-1 if wrong.ndim == 1 else 0] = value
    with pytest.raises(IndexError, match=FIELDS[field][0]):
        forward(replace(step, **{field: wrong}), layer.cache)
    np.testing.assert_array_equal(layer.ops.to_host(forward(step, layer.cache)), right)


def test_first_invalid_index_is_named_with_limit(layer):
    forward, ids = layer.ops.compile(model_on(layer)), layer.step.token_ids.copy()
    ids[7] = 4
    with pytest.raises(IndexError, match="a step: token id 4 at index 7 is not in 0 to 3"):
        forward(replace(layer.step, token_ids=ids), layer.cache)


@pytest.mark.parametrize("field", ["token_ids", "positions", "kv_slots", "query_start", "block_tables"])
def test_step_arrays_of_wrong_size_or_type_are_rejected(layer, field):
    forward, array = layer.ops.compile(model_on(layer)), getattr(layer.step, field)
    for wrong in (
        array[:-1] if array.ndim == 1 else array[:-1, :],
        array.astype(np.int64),
        np.stack([array, array], -1)[..., 0],
    ):
        with pytest.raises((ValueError, IndexError), match=f"{field}: expected .* elements|a step: "):
            forward(replace(layer.step, **{field: wrong}), layer.cache)


@pytest.mark.parametrize("adapter_slot", [-1, 3, 2**31 - 1])
def test_missing_adapter_is_rejected(native, adapter_slot):
    layer = LayerOn(native(), Geometry(adapter_ranks=(5, 8)))
    places = layer.places.copy()
    places[3] = adapter_slot
    layer.step = replace(layer.step, lora_slots=adapter_rows(places, layer.ops)["lora_slots"])
    with pytest.raises(IndexError, match="adapter"):
        layer.run(layer.ops)


@pytest.mark.parametrize("slot", [-1, 2**31 - 1])
def test_writes_outside_the_cache_are_rejected(layer, slot):
    ops, g = layer.ops, layer.g
    k = ops.from_host(np.ones((2, g.kv_heads, g.d), np.float32))
    slots = ops.from_host(np.array([0, slot], np.int32))
    before = layer.cache.export_blocks(np.arange(layer.cache.num_blocks, dtype=np.int32))
    with pytest.raises(IndexError, match=f"KV slot {slot} at index 1"):
        ops.write_kv(layer.kv, k, k, slots)
    with pytest.raises(ValueError, match="k: expected"):
        ops.write_kv(layer.kv, k[:1], k, slots)
    np.testing.assert_array_equal(layer.cache.export_blocks(np.arange(layer.cache.num_blocks, dtype=np.int32)), before)


def test_layer_and_heads_of_another_model_are_rejected(layer):
    with pytest.raises(IndexError, match="expected a layer from 0 to 1, got 9"):
        layer.cache.layer(9)
    other = LayerOn(layer.ops, Geometry(d=32))
    with pytest.raises(IndexError, match="heads of another model"):
        layer.ops.paged_attention(
            other.ops.from_host(np.zeros((3, 4, 32), np.float32)), layer.kv, other.heads, layer.step
        )


@pytest.mark.parametrize("value", [-1, 50, 2**31 - 1])
@pytest.mark.parametrize("field", ["rows", "counts_rows", "draft_rows", "draft_ids"])
def test_penalties_out_of_range_are_rejected(native, field, value):
    ops = native()
    penalties = on_device(ops, penalty_input(np.zeros((3, 50), np.int32), drafts=[(1, 7)]))
    wrong = getattr(penalties, field).copy()
    wrong[-1] = value
    with pytest.raises(IndexError, match=f"penalize: .*{value}"):
        ops.penalize(np.zeros((3, 50), np.float32), replace(penalties, **{field: wrong}))


def test_counts_of_another_vocabulary_are_rejected(native):
    ops = native()
    penalties = on_device(ops, penalty_input(np.zeros((3, 49), np.int32)))
    with pytest.raises(ValueError, match="counts: expected 150"):
        ops.penalize(np.zeros((3, 50), np.float32), penalties)


def test_masks_out_of_range_are_rejected(native):
    ops, bits = native(), np.zeros((2, 2), np.int32)
    rows = np.array([0, 3], np.int32)
    with pytest.raises(IndexError, match="row of logits 3 at index 1 is not in 0 to 2"):
        ops.mask_logits(np.zeros((3, 50), np.float32), rows, bits)
    with pytest.raises(ValueError, match="do not match 2 rows of 65 tokens"):
        ops.mask_logits(np.zeros((3, 65), np.float32), rows, bits)


def test_sampling_parameters_of_fewer_rows_are_rejected(native):
    ops = native()
    with pytest.raises(ValueError, match="temperature: expected 3"):
        ops.sample(np.zeros((3, 50), np.float32), on_device(ops, sample_input(2)))
