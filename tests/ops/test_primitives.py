"""The packs against the numpy oracle, and the oracle against the words of the contract."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from fd_core.ops.contract import Experts, Heads, KVShape, Norm, Rope
from fd_core.ops.numpy_ops import NumpyOps
from fd_core.ops.torch_ops import TorchOps
from fd_core.types import RawTensor
from tests.ops.packs import FORMS, INSTALLED, PACKS, on_device, raw, step_input

RNG_SEED = 11


@pytest.fixture
def rng():
    return np.random.default_rng(RNG_SEED)


def everywhere(compute):
    """Compute on every pack and return what the oracle says, after checking that the others agree."""
    oracle = NumpyOps()
    expected = np.asarray(oracle.to_host(compute(oracle)))
    for pack in INSTALLED[1:]:
        ops = PACKS[pack]()
        np.testing.assert_allclose(ops.to_host(compute(ops)), expected, rtol=1e-5, atol=1e-5, err_msg=pack)
    return expected


def test_embedding_scales_rows(rng):
    table = rng.normal(size=(7, 4))
    found = everywhere(
        lambda ops: ops.embedding(ops.prepare_embedding(raw(table)), ops.from_host(np.array([3, 0], np.int32)), 2.0)
    )
    np.testing.assert_allclose(found, table[[3, 0]] * 2, rtol=1e-6)


def test_rms_norm_of_rows_and_of_heads(rng):
    x, weight = rng.normal(size=(3, 2, 8)).astype(np.float32), rng.normal(size=8).astype(np.float32)
    found = everywhere(lambda ops: ops.rms_norm(ops.from_host(x), Norm(ops.prepare_vector(weight), 0.1)))
    np.testing.assert_allclose(found[1, 0], x[1, 0] / np.sqrt((x[1, 0] ** 2).mean() + 0.1) * weight, rtol=1e-5)


def test_linear_stacks_parts_and_biases(rng):
    x, a, b = (rng.normal(size=size).astype(np.float32) for size in ((3, 5), (2, 5), (4, 5)))
    biases = [np.arange(2), np.arange(4) * 10]
    found = everywhere(
        lambda ops: ops.linear(ops.from_host(x), ops.prepare_linear([raw(a), raw(b)], list(map(raw, biases))))
    )
    np.testing.assert_allclose(found, np.hstack([x @ a.T + biases[0], x @ b.T + biases[1]]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("silu", lambda z: z / (1 + math.exp(-z))),
        ("gelu", lambda z: z * 0.5 * (1 + math.erf(z / math.sqrt(2)))),
        ("gelu_tanh", lambda z: z * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))),
    ],
)
def test_gated_linear_activates_the_gate(rng, activation, function):
    x, gate, up = (rng.normal(size=size).astype(np.float32) for size in ((3, 5), (4, 5), (4, 5)))
    found = everywhere(
        lambda ops: ops.gated_linear(ops.from_host(x), ops.prepare_linear([raw(gate), raw(up)], gated=True), activation)
    )
    np.testing.assert_allclose(found, np.vectorize(function)(x @ gate.T) * (x @ up.T), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 4])
def test_rope_turns_pairs_and_leaves_the_rest(rng, interleaved, rotary):
    x = rng.normal(size=(3, 2, 8)).astype(np.float32)
    angles = rng.uniform(0, 6, size=(5, rotary // 2))
    positions = np.array([4, 0, 2], np.int32)

    def compute(ops):
        cos, sin = (ops.prepare_vector(table.astype(np.float32)) for table in (np.cos(angles), np.sin(angles)))
        return ops.rope(ops.from_host(x), Rope(cos, sin, interleaved), ops.from_host(positions))

    found = everywhere(compute)
    half = rotary // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    for i, (a, b) in enumerate(pairs):
        turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angles[positions, i])[:, None]
        np.testing.assert_allclose(found[..., a] + 1j * found[..., b], turned, atol=1e-5)
    np.testing.assert_array_equal(found[..., rotary:], x[..., rotary:])


ROWS = [
    [(1, 1), (1, 9), (1, 4)],
    [(6, 6)],
    [(1, 9), (5, 5), (3, 10), (1, 1), (3, 3)],
]


def attention_by_definition(q, keys, values, heads, rows):
    """Every head of every token by itself; keys and values of a row are [context, nkv, d]."""
    output, token = [], 0
    for (count, context), k, v in zip(rows, keys, values, strict=True):
        for position in range(context - count, context):
            first = 0 if heads.window is None else max(0, position - heads.window + 1)
            per_head = []
            for head in range(heads.num_heads):
                kv_head = head // (heads.num_heads // heads.num_kv_heads)
                scores = k[first : position + 1, kv_head] @ q[token, head] * heads.scale
                if heads.softcap is not None:
                    scores = heads.softcap * np.tanh(scores / heads.softcap)
                weights = np.exp(scores - scores.max())
                per_head.append(weights / weights.sum() @ v[first : position + 1, kv_head])
            output.append(np.concatenate(per_head))
            token += 1
    return np.stack(output)


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", ROWS, ids=["decode", "prefill", "mixed"])
def test_attention_reads_scattered_blocks(rng, rows, window, softcap):
    block_size, width = 4, 3
    tables = rng.permutation(len(rows) * width + 2)[: len(rows) * width].reshape(len(rows), width).astype(np.int32)
    keys = [rng.normal(size=(context, 2, 8)).astype(np.float32) for _, context in rows]
    values = [rng.normal(size=(context, 2, 8)).astype(np.float32) for _, context in rows]
    q = rng.normal(size=(sum(count for count, _ in rows), 6, 8)).astype(np.float32)
    heads = Heads(6, 2, 8, 0.3, Rope(None, None), window=window, softcap=softcap)
    earlier = step_input([(context, context) for _, context in rows], block_size, tables)
    used = -(-np.array([context for _, context in rows]) // block_size)
    # Entries beyond the context have no meaning.
    visible = np.where(np.arange(width) < used[:, None], tables, np.int32(2**20))
    step = replace(step_input(rows, block_size, tables), block_tables=visible)

    def compute(ops):
        cache = ops.allocate_kv(KVShape(2, 2, 8, block_size), len(rows) * width + 2)
        layer = cache.layer(1)
        ops.write_kv(layer, *map(ops.from_host, (np.concatenate(keys), np.concatenate(values), earlier.kv_slots)))
        return ops.paged_attention(ops.from_host(q), layer, heads, on_device(ops, step))

    found = everywhere(compute)
    np.testing.assert_allclose(found, attention_by_definition(q, keys, values, heads, rows), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_moe_adds_the_weighted_outputs_of_the_chosen_experts(rng, normalize, corrected):
    x, router = rng.normal(size=(9, 6)).astype(np.float32), rng.normal(size=(5, 6)).astype(np.float32)
    bias = (rng.normal(size=5) if corrected else np.zeros(5)).astype(np.float32)
    gates, ups = rng.normal(size=(2, 6, 4, 6)).astype(np.float32)
    downs = rng.normal(size=(6, 6, 4)).astype(np.float32)  # the last one is shared

    def compute(ops):
        experts = Experts(
            router=ops.prepare_vector(router),
            gate_up=ops.prepare_experts([[raw(gates[e]), raw(ups[e])] for e in range(5)], gated=True),
            down=ops.prepare_experts([[raw(downs[e])] for e in range(5)], gated=False),
            top_k=2,
            normalize=normalize,
            correction_bias=ops.prepare_vector(bias) if corrected else None,
            norm_floor=0.7,
            shared_gate_up=ops.prepare_linear([raw(gates[5]), raw(ups[5])], gated=True),
            shared_down=ops.prepare_linear([raw(downs[5])]),
        )
        return ops.moe(ops.from_host(x), experts, "silu")

    def expert(index, token):
        gate = gates[index] @ token
        return downs[index] @ (gate / (1 + np.exp(-gate)) * (ups[index] @ token))

    found = everywhere(compute)
    for token, result in zip(x, found, strict=True):
        scores = np.exp(router @ token) / np.exp(router @ token).sum()
        chosen = np.argsort(-(scores + bias))[:2]
        weights = scores[chosen] / (max(scores[chosen].sum(), 0.7) if normalize else 1)
        expected = expert(5, token) + sum(w * expert(e, token) for w, e in zip(weights, chosen, strict=True))
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_logits_are_float32_and_softly_capped(rng):
    x, weight = rng.normal(size=(2, 6)).astype(np.float32), rng.normal(size=(9, 6)).astype(np.float32)

    def compute(ops):
        return ops.logits_of(ops.from_host(x), ops.prepare_linear([raw(weight)]), 1.5)

    np.testing.assert_allclose(everywhere(compute), 1.5 * np.tanh(x @ weight.T / 1.5), rtol=1e-4, atol=1e-5)
    ops = TorchOps("bfloat16")
    half = ops.linear(
        ops.embedding(ops.prepare_embedding(raw(x)), ops.from_host(np.arange(2, dtype=np.int32))),
        ops.prepare_linear([raw(np.eye(6))]),
    )
    assert ops.to_host(ops.logits_of(half, ops.prepare_linear([raw(weight)]), None)).dtype == np.float32


@pytest.mark.parametrize("pack", PACKS)
def test_gathers_rows_of_any_array(pack):
    ops = PACKS[pack]()
    rows = ops.from_host(np.array([2, 0, 2], np.int32))
    for array in (np.arange(3, dtype=np.int32), np.arange(6, dtype=np.float32).reshape(3, 2)):
        np.testing.assert_array_equal(ops.to_host(ops.gather_rows(ops.from_host(array), rows)), array[[2, 0, 2]])


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (RawTensor("F32", np.array([[1.5, -2.0]], np.float32)), [[1.5, -2.0]]),
        (RawTensor("F16", np.array([[1.5, -2.0]], np.float16)), [[1.5, -2.0]]),
        (RawTensor("BF16", np.array([[0x3FC0, 0xC000]], np.uint16)), [[1.5, -2.0]]),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_every_type_keep_their_values(form, tensor, expected):
    ops = FORMS[form]()
    tensor.data.flags.writeable = False  # as from a mapped file
    table = ops.prepare_embedding(tensor)
    row = ops.embedding(table, ops.from_host(np.zeros(1, np.int32)))
    assert ops.to_host(row).tolist() == expected
    projected = ops.linear(row, ops.prepare_linear([tensor, tensor]))
    assert ops.to_host(projected).tolist() == [[6.25, 6.25]]
    assert ops.to_host(ops.linear(row, ops.tied_head(table, tensor))).tolist() == [[6.25]]


@pytest.mark.parametrize("form", FORMS)
def test_blocks_move_bit_for_bit(form, rng):
    ops = FORMS[form]()
    shape = KVShape(num_layers=2, num_kv_heads=3, head_dim=4, block_size=2)
    source, target = ops.allocate_kv(shape, 5), ops.allocate_kv(shape, 7)
    exported = rng.integers(0, 2**14, (3, 2, 2, 2, 3, 4))
    exported = exported.astype(np.uint16) if ops.dtype == "bfloat16" else exported.astype(np.float32)
    source.import_blocks(np.array([4, 0, 2], np.int32), exported)
    target.import_blocks(np.array([1, 6], np.int32), source.export_blocks(np.array([0, 4], np.int32)))
    moved = target.export_blocks(np.array([6, 1, 0], np.int32))
    assert moved.dtype == exported.dtype
    np.testing.assert_array_equal(moved[0], exported[0])
    np.testing.assert_array_equal(moved[1], exported[1])
    assert not moved[2].any()


def test_exported_blocks_are_keys_then_values_by_position(rng):
    k, v = rng.normal(size=(2, 3, 2, 4)).astype(np.float32)
    for pack in INSTALLED:
        ops = PACKS[pack]()
        cache = ops.allocate_kv(KVShape(1, 2, 4, 2), 3)
        slots = np.array([4, 5, 0], np.int32)  # block 2, then the first place of block 0
        ops.write_kv(cache.layer(0), *map(ops.from_host, (k, v, slots)))
        exported = cache.export_blocks(np.array([2, 0], np.int32))
        np.testing.assert_array_equal(exported[0, 0, 0], k[:2])
        np.testing.assert_array_equal(exported[0, 0, 1], v[:2])
        np.testing.assert_array_equal(exported[1, 0, :, 0], [k[2], v[2]])


@pytest.mark.parametrize("pack", PACKS)
def test_blocks_of_another_type_are_refused(pack):
    cache = PACKS[pack]().allocate_kv(KVShape(1, 1, 4, 2), 2)
    with pytest.raises(ValueError, match="exported blocks are uint16, the cache holds float32"):
        cache.import_blocks(np.array([0], np.int32), np.zeros((1, 1, 2, 2, 1, 4), np.uint16))


@pytest.mark.parametrize("pack", PACKS)
def test_a_cache_that_does_not_fit_says_so(pack):
    with pytest.raises(MemoryError):
        PACKS[pack]().allocate_kv(KVShape(64, 64, 256, 64), 2**24)


@pytest.mark.parametrize("pack", PACKS)
def test_later_steps_with_other_shapes_are_planned_anew(pack, rng):
    """A pack that keeps a plan for each step must not share it between two steps in a row."""
    ops, oracle = PACKS[pack](), NumpyOps()
    heads = Heads(2, 1, 4, 0.5, Rope(None, None))
    tables = np.array([[1, 0]], np.int32)
    caches = [each.allocate_kv(KVShape(1, 1, 4, 2), 2) for each in (ops, oracle)]
    steps = [step_input([(after - before, after)], 2, tables) for before, after in pairwise([0, 2, 3, 4])]
    for step in steps:
        count = len(step.positions)
        q, k, v = (rng.normal(size=(count, heads_, 4)).astype(np.float32) for heads_ in (2, 1, 1))
        found = []
        for each, cache in zip((ops, oracle), caches, strict=True):
            shown = on_device(each, step)
            each.write_kv(cache.layer(0), each.from_host(k), each.from_host(v), shown.kv_slots)
            found.append(each.to_host(each.paged_attention(each.from_host(q), cache.layer(0), heads, shown)))
        np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)
