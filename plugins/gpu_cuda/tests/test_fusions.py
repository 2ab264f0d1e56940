"""The kernels of fusions, in Triton's interpreter, against the numpy oracle and torch's operations one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fd_core.ops.contract import Heads, Norm, Ops, Rope  # noqa: E402 - only where both are installed
from fd_core.ops.numpy.ops import NumpyOps  # noqa: E402
from fd_core.ops.torch.group import add_in_rank_order  # noqa: E402
from fd_core.ops.torch.ops import TorchOps  # noqa: E402
from fd_core.testing.models.arrays import Values, activations, assert_near, on_device, raw, step_input  # noqa: E402
from fd_core.testing.models.layers import Geometry, LayerOn  # noqa: E402
from plain_fusions import plain_add_norm, plain_gate, plain_rotate_and_store  # noqa: E402
from processor import PLAIN, Processor  # noqa: E402

from fd_gpu_cuda.kernels.heads import rotate_and_store  # noqa: E402
from fd_gpu_cuda.kernels.norms import add_norm, add_ranks, gate  # noqa: E402
from fd_gpu_cuda.kv_cache import CudaLayer  # noqa: E402
from fd_gpu_cuda.ops import CudaOps, Residual  # noqa: E402

FUSED = replace(PLAIN, add_norm=add_norm, rotate_and_store=rotate_and_store, gate=gate)
COMPOSED = replace(PLAIN, add_norm=None, rotate_and_store=None, gate=None)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 2e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""One step of each type at 1: the difference that the order of a sum may make in the last bit."""


def norm_of(width: int, seed: int) -> Norm:
    return Norm(torch.from_numpy(1 + Values(seed)(width, scale=0.1)), 0.1 * seed + 1e-5)


def random(dtype: Any, *shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(Values(seed)(*shape)).to(dtype)


def assert_steps(found: Any, expected: Any, steps: float = 2) -> None:
    """At most some steps of the type apart, where the largest value has them largest."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    largest = max(float(expected.float().abs().max()), 1.0) if expected.numel() else 1.0
    error = (found.double() - expected.double()).abs()
    assert not expected.numel() or float(error.max()) <= steps * ROUNDING[expected.dtype] * largest


# Norms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [38, 576, 2048, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["norm", "sum", "sum of a norm", "rows", "rows of a sum", "no norm"])
def test_sum_and_its_norm(form: str, dtype: Any, width: int) -> None:
    x, y = random(dtype, 5, width), random(dtype, 5, width, seed=1)
    norm, post = norm_of(width, 2), norm_of(width, 3)
    rows = torch.tensor([3, 0, 3], dtype=torch.int32)
    given: dict[str, Any] = {
        "norm": {"norm": norm},
        "sum": {"norm": norm, "y": y},
        "sum of a norm": {"norm": norm, "y": y, "post_norm": post},
        "rows": {"norm": norm, "rows": rows},
        "rows of a sum": {"norm": norm, "y": y, "post_norm": post, "rows": rows},
        "no norm": {"norm": None, "y": y, "post_norm": post},
    }[form]
    ours, theirs, before = x.clone(), x.clone(), x.clone()
    found, expected = add_norm(ours, **given), plain_add_norm(theirs, **given)
    assert_steps(found, expected, 4)
    assert_steps(ours, theirs)
    if "rows" in given or "y" not in given:
        assert torch.equal(ours, before)
    elif "post_norm" not in given and dtype != torch.bfloat16:  # the interpreter cuts bfloat16 off instead of rounding
        assert torch.equal(ours, before + y)
    if form == "no norm":
        assert found is ours


def test_norms_of_the_oracle() -> None:
    oracle, x, weight = NumpyOps(), Values()(3, 2048), 1 + Values(2)(2048, scale=0.1)
    expected = oracle.rms_norm(x, Norm(weight, 1e-6))
    found = add_norm(torch.from_numpy(x), Norm(torch.from_numpy(weight), 1e-6))
    assert_near(TorchOps(), found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (3, 1000), (8, 4096), (8, 0)])
def test_ranks_are_added_in_order_and_rounded_once(ranks: int, count: int, dtype: Any) -> None:
    """Without bfloat16, to which the interpreter does not round."""
    parts = torch.from_numpy(Values(ranks)(ranks, count) * np.logspace(0, 4, ranks, dtype="f4")[:, None]).to(dtype)
    assert torch.equal(add_ranks(parts), add_in_rank_order(parts))


def test_empty_steps_launch_nothing_and_keep_their_shapes() -> None:
    heads = Heads(4, 2, 64, 0.1, Rope(torch.ones(8, 32), torch.zeros(8, 32)))
    layer = layer_of(heads, torch.float32, 8)
    step = on_device(TorchOps(), step_input([(1, 1)], 4, np.zeros((1, 1), np.int32)))
    empty = torch.empty(0, 576)
    assert add_norm(empty, norm_of(576, 0), empty).shape == (0, 576)
    assert add_norm(random(torch.float32, 3, 576), norm_of(576, 0), rows=torch.empty(0, dtype=torch.int32)).shape == (
        0,
        576,
    )
    assert gate(torch.empty(0, 20), "silu").shape == (0, 10)
    assert rotate_and_store(torch.empty(0, 512), layer, heads, step).shape == (0, 4, 64)


def test_row_has_the_same_bits_alone() -> None:
    x, y, norm = random(torch.float32, 9, 576), random(torch.float32, 9, 576, seed=1), norm_of(576, 2)
    together = add_norm(x.clone(), norm, y)
    assert torch.equal(add_norm(x[4:5].clone(), norm, y[4:5]), together[4:5])


# Heads --------------------------------------------------------------------------------------------------------

HEADS = {
    "d 64": {"nh": 9, "nkv": 3, "d": 64},
    "d 80, partial": {"nh": 4, "nkv": 4, "d": 80, "rotary": 32},
    "d 128, partial": {"nh": 4, "nkv": 2, "d": 128, "rotary": 32},
    "d 80": {"nh": 5, "nkv": 1, "d": 80},
    "d 128, norms": {"nh": 32, "nkv": 8, "d": 128, "norms": True},
    "d 128, neighbours": {"nh": 20, "nkv": 4, "d": 128, "interleaved": True},
    "d 256, norms": {"nh": 4, "nkv": 1, "d": 256, "norms": True},
    "d 10, norms, neighbours": {"nh": 3, "nkv": 3, "d": 10, "interleaved": True, "norms": True},
    "d 24, partial neighbours": {"nh": 2, "nkv": 2, "d": 24, "rotary": 8, "interleaved": True},
}


def heads_of(nh: int, nkv: int, d: int, rotary: int = 0, interleaved: bool = False, norms: bool = False) -> Heads:
    half = (rotary or d) // 2
    angles = np.arange(5000)[:, None] / 10000.0 ** (np.arange(half) / half)
    rope = Rope(*(torch.from_numpy(f(angles).astype(np.float32)) for f in (np.cos, np.sin)), interleaved)
    return Heads(nh, nkv, d, 0.1, rope, *((norm_of(d, 5), norm_of(d, 6)) if norms else (None, None)))


def layer_of(heads: Heads, dtype: Any, slots: int) -> CudaLayer:
    """A layer whose every element is 7."""
    shape = slots, heads.num_kv_heads, heads.head_dim
    keys, values = (torch.full(shape, 7.0).to(dtype) for _ in range(2))
    return CudaLayer(keys, values, 4, *(torch.full(shape[:2], 7.0) for _ in range(2 * (dtype == torch.int8))))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(("dtype", "kv"), [*product(DTYPES, (None, torch.int8)), (torch.bfloat16, torch.float8_e4m3fn)])
def test_heads_are_normalized_turned_and_stored(name: str, dtype: Any, kv: Any) -> None:
    heads = heads_of(**HEADS[name])
    blocks = np.random.default_rng(3).permutation(1500).astype(np.int32)
    tables = np.stack([np.resize(blocks[begin:], 1001) for begin in (0, 400, 499)])
    step = on_device(TorchOps(), step_input([(1, 4001), (2, 9), (1, 1)], 4, tables))
    qkv = random(dtype, 4, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    ours, theirs = (layer_of(heads, kv or dtype, 6000) for _ in range(2))
    found, expected = rotate_and_store(qkv, ours, heads, step), plain_rotate_and_store(qkv, theirs, heads, step)
    assert_steps(found, expected, 4)
    exact = dtype == torch.float32 and heads.q_norm is None  # sums of norms have another order
    assert not exact or torch.equal(found, expected)
    for each in (ours.keys, ours.values):
        assert (each.float() != 7).flatten(1).any(1).nonzero()[:, 0].tolist() == sorted(step.kv_slots.tolist())
    for one, other in zip(ours, theirs, strict=True):
        if other is None or isinstance(other, int):
            assert one == other
        elif exact or other is theirs.values or other is theirs.value_scales:
            assert torch.equal(one.float(), other.float())
        elif other.dtype == torch.float8_e4m3fn:
            torch.testing.assert_close(one.float(), other.float(), rtol=1 / 7, atol=2.0**-9)  # a step
        elif other.dtype == torch.int8:
            # Halfway between two steps; and the interpreter cuts bfloat16 off, which is two more.
            assert int((one.int() - other.int()).abs().max()) <= (3 if dtype == torch.bfloat16 else 1)
        elif kv == torch.int8:
            torch.testing.assert_close(one, other, rtol=4 * ROUNDING[dtype], atol=0)
        else:
            assert_steps(one, other, 4)


# Activations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [50, 1536, 3072])
def test_activations(activation: Any, dtype: Any, inner: int) -> None:
    x = random(dtype, 3, 2 * inner) * 4
    x[0, :8] = torch.tensor([0.0, -0.0, 60.0, -60.0, 1e4, -1e4, 1e-4, -1e-4]).to(dtype)
    found, expected = gate(x, activation), plain_gate(x.clone(), activation)
    assert torch.isfinite(found.float()).all() or dtype == torch.float16
    assert_steps(found, expected, 4)
    wide = torch.cat((x, x), 1)[:, : 2 * inner]
    assert torch.equal(gate(wide, activation), found)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_activations_of_the_oracle(activation: Any) -> None:
    x = Values()(4, 300, scale=3.0)
    assert_near(TorchOps(), gate(torch.from_numpy(x), activation), NumpyOps().gate(x, activation), 2e-6)


# The residual stream ------------------------------------------------------------------------------------------


def ops_with(kernels: Any = FUSED) -> CudaOps:
    return CudaOps("float32", Processor(), kernels)


@pytest.mark.parametrize("kernels", [FUSED, PLAIN, COMPOSED], ids=["fused", "plain", "composed"])
def test_sum_is_added_once_for_all_readers(kernels: Any) -> None:
    """By one norm, by several, by none: each way ends at the same residual."""
    values = Values()
    x, a = values(3, 48), [values(3, 16) for _ in range(3)]
    oracle, ops = NumpyOps(), ops_with(kernels)
    weight = raw(values(48, 16, scale=0.25))
    results = []
    for pack in (oracle, ops):
        norm = Norm(pack.prepare_vector(1 + Values(5)(48, scale=0.1)), 1e-5)
        linear = pack.prepare_linear([weight])
        stream = activations(pack, x)
        seen = []
        for step, inputs in enumerate(a):
            stream = pack.project_residual(activations(pack, inputs), linear, stream, norm if step == 1 else None)
            seen += [pack.to_host(pack.rms_norm(stream, norm)).copy() for _ in range(step)]  # 0, 1 or 2 norms
        seen.append(pack.to_host(pack.settle(stream)).copy())
        seen.append(pack.to_host(pack.settle(stream)).copy())
        results.append(seen)
    for found, expected in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_logits_do_not_change_the_residual() -> None:
    ops, values = ops_with(), Values()
    norm = Norm(ops.prepare_vector(1 + values(48, scale=0.1)), 1e-5)
    linear = ops.prepare_linear([raw(values(48, 16))])
    head = ops.prepare_linear([raw(values(20, 48))])
    x = activations(ops, values(4, 48))
    stream = ops.project_residual(activations(ops, values(4, 16)), linear, x)
    assert isinstance(stream, Residual)
    rows = torch.tensor([2, 0], dtype=torch.int32)
    first = ops.logits(stream, norm, head, rows)
    assert torch.equal(ops.logits(stream, norm, head, rows), first)
    expected = ops.linear(ops.rms_norm(ops.settle(stream), norm), head)[rows.long()]
    torch.testing.assert_close(first, expected)


LAYERS = {
    "smollm2": Geometry(heads=9, kv_heads=3, d=64, hidden=576, block_size=32),
    "odd sizes": Geometry(heads=3, kv_heads=3, d=10, hidden=38, inner=50, block_size=5),
    "partial rope": Geometry(heads=4, kv_heads=4, d=80, rotary=32, block_size=16),
    "neighbours": Geometry(interleaved=True),
    "head norms": Geometry(head_norms=True),
    "head norms alone": Geometry(head_norms=True, pre_norm=False, post_norm=True),
    "norms after rope": Geometry(norms_rotated=True),
    "joint norms": Geometry(joint_norms=True, pre_norm=False, post_norm=True, ungated="relu2"),
    "norms after": Geometry(post_norm=True, activation="gelu_tanh"),
    "adapters": Geometry(post_norm=True, d=64, block_size=32, inner=150, adapter_ranks=(5, 8)),
    "experts": Geometry(experts=5, shared_expert=True, shared_gate=True),
    "packed": Geometry(d=32, hidden=128, inner=256, packed="Q4_1"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_with_kernels_matches_the_oracle(name: str) -> None:
    g, ops = LAYERS[name], ops_with()
    for found, expected in zip(LayerOn(ops, g).run(ops), LayerOn(NumpyOps(), g).run(Ops), strict=True):
        assert_near(ops, torch.from_numpy(found), expected, None if g.packed is None else 4e-2)


def test_each_fusion_is_composed_where_its_kernel_is_missing() -> None:
    ops = ops_with(COMPOSED)
    layer = LayerOn(ops, LAYERS["head norms"], [(3, 9), (1, 4)])
    for found, expected in zip(layer.run(ops), LayerOn(ops, layer.g, layer.rows).run(Ops), strict=True):
        np.testing.assert_array_equal(found, expected)
