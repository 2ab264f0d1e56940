"""LoRA: the kernels in Triton's interpreter, and the tables they read, against float64 and the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from extent import AT_LENGTH  # noqa: E402
from fd_core.ops.contract import Lora  # noqa: E402 - only where both are installed
from fd_core.ops.numpy.ops import NumpyOps  # noqa: E402
from fd_core.ops.weights import LowRank  # noqa: E402
from fd_core.runner.inputs.inputs import adapter_rows  # noqa: E402
from fd_core.testing.models.arrays import Values, on_device, packed_weight, step_input  # noqa: E402
from interpreting import dots_in_order  # noqa: E402, F401 - a fixture
from launches import counted  # noqa: E402
from processor import PLAIN, Processor  # noqa: E402

from fd_gpu_cuda.kernels.lora import lora_addition  # noqa: E402
from fd_gpu_cuda.ops import CudaOps  # noqa: E402

Adapter = Sequence[LowRank | None] | None
TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


def make_ops(dtype: str = "float32") -> CudaOps:
    return CudaOps(dtype, Processor(), replace(PLAIN, lora=lora_addition()))


def adapter(make: Values, ranks: Sequence[int], inputs: int, outs: Sequence[int]) -> list[LowRank | None]:
    """Return an adapter; rank 0 leaves a part alone."""
    return [
        LowRank(make(rank, inputs, scale=inputs**-0.5), make(out, rank, scale=rank**-0.5)) if rank else None
        for rank, out in zip(ranks, outs, strict=True)
    ]


def lora_of(ops: Any, adapters: Sequence[Adapter], slots: Any, inputs: int, outs: Sequence[int]) -> Lora:
    deltas = [None if each is None else ops.prepare_lora(each, outs) for each in adapters]
    step = step_input([(len(slots), len(slots))], 8, np.zeros((1, -(-len(slots) // 8)), np.int32))
    fields = adapter_rows(np.array(slots, np.int32), ops)
    return Lora(ops.place_loras(deltas, inputs, outs), replace(on_device(ops, step), **fields))


def added(x: Any, adapters: Sequence[Adapter], slots: Any, outs: Sequence[int]) -> Any:
    """Return the LoRA terms in float64."""
    y = np.zeros((len(x), sum(outs)))
    for token, slot in enumerate(slots):
        end = 0
        for part, out in zip(
            adapters[slot - 1] or [None] * len(outs) if slot else [None] * len(outs), outs, strict=True
        ):
            if part is not None:
                y[token, end : end + out] = part.up.astype(np.float64) @ (part.down.astype(np.float64) @ x[token])
            end += out
    return y


def numbers(ops: CudaOps, values: Any) -> Any:
    return ops.from_host(values).to(ops.torch_dtype)


CASES = {
    "one of rank 1": ([(1,)], [48], 64),
    "ranks of real adapters": ([(8,), (16,), (64,), (1,)], [200], 192),
    "parts of their own rank, some left alone": ([(3, 2, 0), (0, 0, 5), (16, 16, 16), (0, 33, 7)], [96, 32, 40], 130),
    "an unused slot, and an adapter that changes nothing": ([None, (4, 4), (0, 9)], [70, 70], 96),
    "inputs beyond a cut": ([(8,), (20,)], [64], 2200),
}


@pytest.mark.parametrize("tokens", [1, 7, pytest.param(64, marks=AT_LENGTH), 70])
@pytest.mark.parametrize("case", CASES)
def test_each_token_gets_the_terms_of_its_adapter(case: str, tokens: int) -> None:
    """Up to 64 tokens are computed as decodes are, more as prompts are; some have no adapter."""
    ranks, outs, inputs = CASES[case]
    ops, make, random = make_ops(), Values(3), np.random.default_rng(tokens)
    adapters = [None if each is None else adapter(make, each, inputs, outs) for each in ranks]
    x, y = make(tokens, inputs), make(tokens, sum(outs))
    slots = random.integers(0, len(ranks) + 1, tokens) if tokens > 1 else [len(ranks)]
    lora = lora_of(ops, adapters, slots, inputs, outs)
    found = ops.lora(numbers(ops, y), numbers(ops, x), lora)
    np.testing.assert_allclose(found.numpy(), y + added(x, adapters, slots, outs), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.usefixtures("dots_in_order")
def test_types_of_16_bits_agree_with_the_composition(dtype: str) -> None:
    ranks, outs, inputs = CASES["parts of their own rank, some left alone"]
    ops, make = make_ops(dtype), Values(5)
    plain = ops.alone(replace(PLAIN, lora=None))
    adapters = [adapter(make, each, inputs, outs) for each in ranks]
    x, y = (numbers(ops, make(11, width)) for width in (inputs, sum(outs)))
    slots = np.arange(11) % 5
    found, expected = (
        each.lora(y.clone(), x, lora_of(each, adapters, slots, inputs, outs)).double() for each in (ops, plain)
    )
    exact = y.double().numpy() + added(x.double().numpy(), adapters, slots, outs)
    for one in (found, expected):
        np.testing.assert_allclose(one, exact, rtol=0, atol=2 * TOLERANCE[dtype] * np.abs(exact).max())


def test_oracle_agrees() -> None:
    ranks, outs, inputs = CASES["ranks of real adapters"]
    ops, oracle, make = make_ops(), NumpyOps(), Values(7)
    adapters, slots = [adapter(make, each, inputs, outs) for each in ranks], np.array([4, 4, 0, 1, 3, 2, 1])
    x, y = make(7, inputs), make(7, *outs)
    expected = oracle.lora(y.copy(), x, lora_of(oracle, adapters, slots, inputs, outs))
    found = ops.lora(numbers(ops, y), numbers(ops, x), lora_of(ops, adapters, slots, inputs, outs))
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("dots_in_order")
def test_token_has_the_same_bits_alone_and_in_every_batch() -> None:
    inputs, outs = 1100, [40, 24]
    ops, make, random = make_ops(), Values(9), np.random.default_rng(2)
    adapters = [adapter(make, ranks, inputs, outs) for ranks in ((8, 3), (17, 0), (1, 40))]
    x, y = numbers(ops, make(90, inputs)), numbers(ops, make(90, sum(outs)))
    slots = random.integers(0, 4, 90)
    whole = ops.lora(y.clone(), x, lora_of(ops, adapters, slots, inputs, outs))
    for some in ([0], [5, 80, 17], [*range(30, 80)]):
        alone = ops.lora(y[some], x[some], lora_of(ops, adapters, slots[some], inputs, outs))
        assert torch.equal(alone, whole[some]), some


def test_nan_stays_in_its_own_row_and_rows_without_adapters_unchanged() -> None:
    inputs, outs = 96, [40, 24]
    ops, make = make_ops(), Values(4)
    well, wild = (adapter(make, (4, 4), inputs, outs) for _ in range(2))
    wild[0].down[:] = np.nan
    wild[1].up[:] = np.inf
    slots = np.array([1, 2, 0, 2, 1, 1])
    x, y = make(6, inputs), make(6, sum(outs))
    x[1], x[3], y[2] = np.inf, np.nan, np.nan
    y[2, ::2] = -0.0
    found = ops.lora(numbers(ops, y), numbers(ops, x), lora_of(ops, [well, wild], slots, inputs, outs)).numpy()
    fine = slots == 1
    np.testing.assert_allclose(found[fine], y[fine] + added(x[fine], [well], slots[fine], outs), rtol=0, atol=2e-5)
    assert not np.isfinite(found[slots == 2]).any()
    assert found[2].tobytes() == y[2].tobytes()


def test_unadapted_part_keeps_its_bits_next_to_an_overflow() -> None:
    inputs, outs = 64, [32, 32]
    ops, make = make_ops(), Values(4)
    wild = adapter(make, (4, 0), inputs, outs)
    wild[0].up[:] = np.inf
    y = make(3, 64)
    found = ops.lora(numbers(ops, y), numbers(ops, make(3, inputs)), lora_of(ops, [wild], [1, 1, 1], inputs, outs))
    assert found[:, 32:].numpy().tobytes() == y[:, 32:].tobytes()


def test_tables_stay_in_place_while_adapters_change() -> None:
    """A graph that reads them computes with the new adapters."""
    inputs, outs = 64, [48]
    ops, make = make_ops(), Values(6)
    first, second = (adapter(make, (rank,), inputs, outs) for rank in (4, 20))
    x, y, slots = make(5, inputs), make(5, 48), [1, 2, 0, 2, 1]
    lora = lora_of(ops, [first], [1] * 5, inputs, outs)
    table, address = lora.deltas, lora.deltas.entries.data_ptr()
    for held in ([second, first], [None, first], [None, None], [first, second]):
        deltas = [None if each is None else ops.prepare_lora(each, outs) for each in held]
        assert ops.place_loras(deltas, inputs, outs, table) is table
        assert table.entries.data_ptr() == address
        mine = lora_of(ops, [None], slots, inputs, outs)
        found = ops.lora(numbers(ops, y), numbers(ops, x), replace(mine, deltas=table))
        np.testing.assert_allclose(found.numpy(), y + added(x, held, slots, outs), rtol=0, atol=2e-5)
    large = [ops.prepare_lora(adapter(make, (65,), inputs, outs), outs)]
    assert ops.place_loras(large, inputs, outs, table).width == 80
    many = ops.place_loras([None] * 9, inputs, outs, table)
    assert len(many.entries) == 9


@pytest.mark.parametrize("tokens", [1, 100])
def test_adapters_add_two_launches_to_a_linear(tokens: int) -> None:
    ops, make, outs = make_ops(), Values(6), [32, 16, 16]
    adapters = [adapter(make, (rank, 0, rank), 48, outs) for rank in (4, 20, 1)]
    lora = lora_of(ops, adapters, np.arange(tokens) % 4, 48, outs)
    x, y = numbers(ops, make(tokens, 48)), numbers(ops, make(tokens, 64))
    ops.lora(y, x, lora)  # compiles
    with counted() as found:
        ops.lora(y, x, lora)
    assert found == ["triton _shrink", "triton _expand"]


def test_packed_weights_support_adapters() -> None:
    ops, oracle, make = make_ops(), NumpyOps(), Values(8)
    inputs, outs = 64, [32]
    weight, one, x = packed_weight("int4", 32, inputs), adapter(make, (8,), inputs, outs), make(5, inputs)
    found, expected = (
        np.asarray(
            each.lora(
                each.linear(rows, each.prepare_linear([weight])),
                rows,
                lora_of(each, [one], [1, 0, 1, 0, 0], inputs, outs),
            )
        )
        for each, rows in ((ops, numbers(ops, x)), (oracle, x))
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
