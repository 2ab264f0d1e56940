"""Mixtures of experts: the kernels in Triton's interpreter against the oracle, and hostile choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from extent import AT_LENGTH  # noqa: E402
from fd_core.config import Limits  # noqa: E402 - only where both are installed
from fd_core.ops.contract import Experts, Ops  # noqa: E402 - only where both are installed
from fd_core.ops.numpy.ops import NumpyOps  # noqa: E402
from fd_core.ops.torch.ops import route  # noqa: E402
from fd_core.ops.weights import FP8, Weight  # noqa: E402
from fd_core.testing.models.arrays import Values, packed_weight, raw  # noqa: E402
from interpreting import dots_in_order  # noqa: E402, F401 - a fixture
from processor import PLAIN, Processor  # noqa: E402

from fd_gpu_cuda.kernels.experts import choose, expert_mixture, most_tiles, order_by_expert  # noqa: E402
from fd_gpu_cuda.kernels.products import ProductDevice, weight_product  # noqa: E402
from fd_gpu_cuda.ops import CudaOps  # noqa: E402
from fd_gpu_cuda.packed import StackedExperts  # noqa: E402

DEVICE = ProductDevice(132, 227 * 1024)
KERNELS = replace(PLAIN, experts=expert_mixture(DEVICE, weight_product(DEVICE)))
COUNT, HIDDEN, INNER = 64, 96, 32


def make_ops(dtype: str = "float32") -> CudaOps:
    return CudaOps(dtype, Processor(), KERNELS)


def weight(kind: str | None, out: int, inputs: int, make: Values) -> Weight:
    # A packed weight depends on its shape alone: scales make the experts differ.
    if kind is None:
        return raw(make(out, inputs, scale=inputs**-0.5))
    packed = packed_weight(kind, out, inputs, group=32, scale=inputs**-0.5)
    order = np.random.default_rng(int(abs(make(1)[0]) * 1e6)).permutation(out)
    return packed.take_rows(order)


def block(
    ops: Ops, kind: str | None = None, *, count: int = COUNT, top_k: int = 8, bias: Any = None, shared: bool = False
) -> Experts:
    """Return experts as Qwen3 routes to them, or ERNIE-4.5 with a bias and shared experts."""
    make = Values(3)
    router = make(count, HIDDEN, scale=HIDDEN**-0.5)
    ups = [[weight(kind, INNER, HIDDEN, make) for _ in range(2)] for _ in range(count)]
    downs = [[weight(kind, HIDDEN, INNER, make)] for _ in range(count)]
    return Experts(
        router=ops.prepare_vector(router),
        gate_up=ops.prepare_experts(ups, gated=True),
        down=ops.prepare_experts(downs, gated=False),
        top_k=top_k,
        normalize=True,
        correction_bias=None if bias is None else ops.prepare_vector(np.asarray(bias, np.float32)),
        norm_floor=0.0 if bias is None else 1e-12,
        shared_gate_up=ops.prepare_linear(ups[0], gated=True) if shared else None,
        shared_down=ops.prepare_linear(downs[0]) if shared else None,
    )


def tokens(count: int) -> Any:
    return Values(count)(count, HIDDEN)


def near(found: Any, right: Any, worst: float = 2e-5) -> None:
    assert found.shape == right.shape
    np.testing.assert_allclose(found.float().numpy(), right, rtol=0, atol=worst * max(np.abs(right).max(), 1e-3))


@pytest.fixture(scope="module")
def experts() -> tuple[Experts, Experts]:
    return block(NumpyOps()), block(make_ops())


@pytest.mark.parametrize("count", [1, 7, 64, pytest.param(300, marks=AT_LENGTH)])
def test_steps_of_any_size_match_the_oracle(count: int, experts: tuple[Experts, Experts]) -> None:
    x = tokens(count)
    near(make_ops().moe(torch.from_numpy(x), experts[1], "silu"), NumpyOps().moe(x, experts[0], "silu"))


@pytest.mark.parametrize("count", [1, 7])
def test_ranks_add_up_the_experts_that_they_hold(count: int, experts: tuple[Experts, Experts]) -> None:
    x, (oracle, whole), end = tokens(count), experts, COUNT // 3

    def held(part: slice) -> Experts:
        def cut(stack: StackedExperts) -> StackedExperts:
            rows = slice(part.start * stack.out, part.stop * stack.out)
            return StackedExperts(stack.weight[rows], part.stop - part.start)

        return replace(whole, gate_up=cut(whole.gate_up), down=cut(whole.down), first=part.start)

    parts = [make_ops().moe(torch.from_numpy(x), held(each), "silu") for each in (slice(0, end), slice(end, COUNT))]
    near(parts[0] + parts[1], NumpyOps().moe(x, oracle, "silu"))


@pytest.mark.parametrize("activation", [pytest.param("gelu", marks=AT_LENGTH), "gelu_tanh"])
def test_other_activations(activation: Any, experts: tuple[Experts, Experts]) -> None:
    x = tokens(5)
    near(make_ops().moe(torch.from_numpy(x), experts[1], activation), NumpyOps().moe(x, experts[0], activation))


@pytest.mark.parametrize("activation", ["relu2", "relu", "quick_gelu", pytest.param("gelu", marks=AT_LENGTH)])
def test_experts_without_a_gate(activation: Any) -> None:
    x, results = tokens(20), []
    for ops in (NumpyOps(), make_ops()):
        parts, make = block(ops, count=6, top_k=2), Values(4)
        ups = [[weight("int4" if activation == "relu2" else None, INNER, HIDDEN, make)] for _ in range(6)]
        given = replace(parts, gate_up=ops.prepare_experts(ups, gated=False), ungated=activation)
        results.append(np.asarray(ops.to_host(ops.moe(ops.from_host(x), given, "silu"))))
    np.testing.assert_allclose(*results, rtol=0, atol=2e-5 * np.abs(results[0]).max())


@pytest.mark.parametrize(
    "favoured",
    [
        pytest.param(1, id="one expert of all"),
        pytest.param(8, id="the same experts", marks=AT_LENGTH),
        pytest.param(63, id="one left out", marks=AT_LENGTH),
    ],
)
def test_skewed_choices(favoured: int) -> None:
    """A tile's experts are found from the counts: all pairs with few of them, most experts with none."""
    bias = np.zeros(COUNT, np.float32)
    bias[np.random.default_rng(0).permutation(COUNT)[:favoured]] = 5
    x = tokens(70)
    right, found = (block(ops, bias=bias) for ops in (NumpyOps(), make_ops()))
    near(make_ops().moe(torch.from_numpy(x), found, "silu"), NumpyOps().moe(x, right, "silu"))


def test_routing_and_the_shared_experts_of_ernie() -> None:
    x, bias = tokens(33), Values(9)(COUNT, scale=0.1)
    right, found = (block(ops, top_k=6, bias=bias, shared=True) for ops in (NumpyOps(), make_ops()))
    near(make_ops().moe(torch.from_numpy(x), found, "silu"), NumpyOps().moe(x, right, "silu"))


@pytest.mark.parametrize(
    "kind", ["int4", pytest.param("Q4_1", marks=AT_LENGTH), pytest.param("int8", marks=AT_LENGTH), FP8, "Q6_K"]
)
def test_packed_experts_stay_packed(kind: str) -> None:
    x = tokens(20)
    right, found = (block(ops, kind, count=6, top_k=2) for ops in (NumpyOps(), make_ops()))
    assert not isinstance(found.gate_up.weight, torch.Tensor)
    near(make_ops().moe(torch.from_numpy(x), found, "silu"), NumpyOps().moe(x, right, "silu"))


@pytest.mark.parametrize("kind", [None, "MXFP4"])
def test_biases_and_the_clamped_activation_of_gpt_oss(kind: str | None) -> None:
    x, results = 3 * tokens(20), []
    for ops in (NumpyOps(), make_ops()):
        make = Values(4)
        parts, count = block(ops, kind, count=6, top_k=2), 6
        ups = [[weight(kind, INNER, HIDDEN, make) for _ in range(2)] for _ in range(count)]
        downs = [[weight(kind, HIDDEN, INNER, make)] for _ in range(count)]
        biases = [[raw(4 * make(INNER)), raw(4 * make(INNER))] for _ in range(count)]
        given = replace(
            parts,
            gate_up=ops.prepare_experts(ups, biases, gated=True),
            down=ops.prepare_experts(downs, [[raw(make(HIDDEN))] for _ in range(count)], gated=False),
            router_bias=ops.prepare_vector(make(count)),
        )
        y = ops.moe(ops.from_host(x), given, "clamped_swiglu")
        results.append(np.asarray(ops.to_host(y)))
    np.testing.assert_allclose(*results, rtol=0, atol=2e-5 * np.abs(results[0]).max())


def test_experts_that_are_packed_in_different_ways_are_expanded() -> None:
    ops, make = make_ops(), Values(1)
    parts = [[weight("int4", INNER, HIDDEN, make), weight(kind, INNER, HIDDEN, make)] for kind in ("int8", "int4")]
    stacked = ops.prepare_experts(parts, gated=True)
    assert isinstance(stacked, StackedExperts) and stacked.weight.shape == (4 * INNER, HIDDEN)
    assert stacked.out == 2 * INNER


@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        pytest.param("float32", None, marks=AT_LENGTH),
        pytest.param("float32", "int4", marks=AT_LENGTH),
        pytest.param("bfloat16", None, marks=AT_LENGTH),
        ("bfloat16", "int4"),
    ],
)
def test_token_has_the_same_bits_alone_and_in_every_batch(dtype: str, kind: str | None) -> None:
    """The tiles of the largest step have four times as many pairs as those of the smallest."""
    ops = make_ops(dtype)
    mixture, x = block(ops, kind, count=8, top_k=2), torch.from_numpy(tokens(150)).to(ops.torch_dtype)
    together = ops.moe(x, mixture, "silu")
    for rows in (slice(0, 1), slice(149, 150), slice(3, 20), slice(40, 110)):
        assert torch.equal(ops.moe(x[rows], mixture, "silu"), together[rows])


def test_nan_and_inf_stay_in_their_own_token(experts: tuple[Experts, Experts]) -> None:
    ops, x = make_ops(), torch.from_numpy(tokens(12))
    right = ops.moe(x, experts[1], "silu")
    x[3, 5], x[7, 0] = torch.nan, torch.inf
    found = ops.moe(x, experts[1], "silu")
    others = [row for row in range(12) if row not in (3, 7)]
    assert not torch.isfinite(found[[3, 7]]).all(1).any()
    assert torch.equal(found[others], right[others])


def test_empty_step(experts: tuple[Experts, Experts]) -> None:
    assert make_ops().moe(torch.empty(0, HIDDEN), experts[1], "silu").shape == (0, HIDDEN)


def test_weights_of_inputs() -> None:
    x = tokens(9)
    right, found = (replace(block(ops), scoring="sigmoid", weighs_inputs=True) for ops in (NumpyOps(), make_ops()))
    near(make_ops().moe(torch.from_numpy(x), found, "silu"), NumpyOps().moe(x, right, "silu"))


@pytest.mark.parametrize("weighs_inputs", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_without_the_kernel_torch_computes_the_experts(captured: bool, weighs_inputs: bool) -> None:
    ops = CudaOps("float32", Processor(), replace(PLAIN, experts=None))
    if captured:
        ops.configure(
            Limits(
                max_num_seqs=16,
                max_num_batched_tokens=64,
                max_model_len=64,
                block_size=16,
                num_kv_blocks=8,
                vocab_size=32,
            )
        )
    x = tokens(9)
    right, found = (replace(block(each, shared=True), weighs_inputs=weighs_inputs) for each in (NumpyOps(), ops))
    near(ops.moe(torch.from_numpy(x), found, "silu"), NumpyOps().moe(x, right, "silu"))


# Routing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("corrected", "normalize"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=AT_LENGTH),
        pytest.param(True, False, marks=AT_LENGTH),
    ],
)
@pytest.mark.parametrize(
    ("count", "top_k", "scoring", "groups"),
    [
        (128, 8, "sigmoid", (8, 4)),
        (60, 4, "softmax", (1, 1)),
        (5, 2, "sigmoid", (1, 1)),
        (12, 3, "softmax", (4, 2)),
    ],
)
def test_choices_are_those_of_the_core(
    count: int, top_k: int, scoring: Any, groups: tuple[int, int], corrected: bool, normalize: bool
) -> None:
    x, bias = torch.from_numpy(Values(1)(40, count)), torch.from_numpy(Values(2)(count, scale=0.05))
    x[0] = 0  # all alike: the first ones are chosen
    x[1, 3] = x[1, 1] = 9  # two alike
    experts = Experts(torch.eye(count), None, None, top_k, normalize, bias if corrected else None, 0.4)
    experts = replace(experts, scoring=scoring, groups=groups[0], top_groups=groups[1], weight_scale=1.5)
    (chosen, weights), (right, shares) = choose(x, experts), route(x, experts)
    assert torch.equal(chosen.long(), right)
    assert torch.allclose(weights, shares, rtol=1e-5)


def test_token_that_is_not_finite_chooses_real_experts() -> None:
    x = torch.zeros(3, 60)
    x[0, 3], x[1], x[2, 5] = torch.nan, -torch.inf, torch.inf
    chosen, weights = choose(x, Experts(torch.eye(60), None, None, 4, True))
    assert ((chosen >= 0) & (chosen < 60)).all() and all(len(set(row)) == 4 for row in chosen.tolist())
    assert torch.isnan(weights).any(1).all()


def test_excluded_expert_is_chosen_last() -> None:
    bias = torch.full((20,), -torch.inf)
    bias[[4, 11]] = 0
    chosen, _ = choose(torch.zeros(1, 20), Experts(torch.eye(20), None, None, 4, True, bias))
    assert chosen.tolist() == [[4, 11, 0, 1]]


@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (700, 8), (9, 3)])
def test_pairs_are_sorted_by_expert_and_then_in_order(count: int, top_k: int) -> None:
    chosen = torch.from_numpy(np.random.default_rng(count).integers(0, 30, (count, top_k), np.int32))
    order, counts = order_by_expert(chosen, 32)
    assert torch.equal(order.long(), chosen.flatten().argsort(stable=True))
    assert torch.equal(counts.long(), chosen.flatten().bincount(minlength=32))


def test_tiles_suffice_for_the_worst_choice() -> None:
    for pairs, experts, tile in ((8, 128, 16), (2048, 128, 16), (300, 5, 128), (128, 128, 16), (3, 64, 16)):
        worst = min(pairs, experts)
        counts = [1] * worst
        counts[0] += pairs - worst  # one more pair than whole tiles in as many experts as can be
        assert most_tiles(pairs, experts, tile) >= sum(-(-count // tile) for count in counts)
        rng = np.random.default_rng(pairs)
        for _ in range(20):
            found = rng.multinomial(pairs, rng.dirichlet(np.full(experts, 0.2)))
            assert most_tiles(pairs, experts, tile) >= sum(-(-count // tile) for count in found)
