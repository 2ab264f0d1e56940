"""Recurrent layers: the kernels in Triton's interpreter, against the oracle and against themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from extent import AT_LENGTH  # noqa: E402
from fd_core.ops.contract import KVShape, Norm, Recurrent, RecurrentRule, StepInput  # noqa: E402
from fd_core.testing.axes.recurrent import RECURRENT  # noqa: E402
from fd_core.testing.models.arrays import Values, on_device, step_input  # noqa: E402
from launches import counted  # noqa: E402
from processor import PLAIN, Processor  # noqa: E402

from fd_gpu_cuda.kernels.recurrent import recur  # noqa: E402
from fd_gpu_cuda.ops import CudaOps  # noqa: E402

OPS = CudaOps("float32", Processor(), replace(PLAIN, recur=recur))
USUAL = {axis.name: axis.values[0] for axis in RECURRENT.axes} | {"prompt": 3, "chunk": 5, "key_heads": 2}
SIZE, DRAFTS, TOKENS = 16, 3, 24
"""Tokens of a block, those of its journal at least, and those of a request."""


@pytest.mark.parametrize(
    "case",
    [
        {"rule": "delta", "rejected": 2, "key_dim": 7, "value_dim": 9, "kv_dtype": "int8"},
        {"rule": "scan", "moved": True, "conv_bias": True},
        {"rule": "scan", "options": False, "taps": 2, "chunk": 1, "kv_dtype": "int8"},
        {"rule": "gate", "rejected": 2, "taps": 3, "prompt": 33, "rows": 5},
        pytest.param({"rule": "delta", "prompt": 65, "chunk": 40}, marks=AT_LENGTH),
    ],
)
def test_steps_match_the_oracle(case: dict[str, Any]) -> None:
    RECURRENT.check(OPS, {**USUAL, **case})


class Layer:
    """A small recurrent layer, and the inputs of two requests."""

    def __init__(self, rule: RecurrentRule) -> None:
        make = Values(5)
        heads = {} if rule == "gate" else {"key_heads": 1, "value_heads": 2, "key_dim": 3, "value_dim": 5}
        more = {"decay": make(2), "time_bias": make(2)} if heads else {}
        channels = 16 if heads else 20
        vectors = {name: OPS.prepare_vector(array) for name, array in more.items()}
        norm = Norm(OPS.prepare_vector(make(5 if rule == "delta" else 10)), 1e-5) if heads else None
        self.recurrent = Recurrent(rule, OPS.prepare_vector(make(4, channels)), **heads, **vectors, norm=norm)
        state, journal = self.recurrent.sizes
        width = -(-(state + DRAFTS * journal) // (2 * SIZE))  # so many words of a key and a value
        self.cache = OPS.allocate_kv(KVShape(1, 1, width, SIZE, state=state, journal=journal), 6)
        self.inputs = make(2, TOKENS, self.recurrent.inputs)

    def compute(self, *rows: tuple[int, int, int], width: int = 0) -> list[Any]:
        """Return the outputs of rows, each a request and its tokens from one to another, padded to `width` tokens."""
        tables = np.array([[1 + 2 * request, 2 + 2 * request] for request, _, _ in rows], np.int32)
        before = [max(width - (upto - start), 0) for _, start, upto in rows]
        spans = [(upto - start + more, upto) for (_, start, upto), more in zip(rows, before, strict=True)]
        host, x = step_input(spans, SIZE, tables), []
        for (request, start, upto), more, first in zip(rows, before, host.query_start, strict=False):
            host.kv_slots[first : first + more] = SIZE * self.cache.spare_block
            x.append(self.inputs[request, start - more : upto])
        step: StepInput = replace(on_device(OPS, host), uniform=width > 0)
        given = OPS.from_host(np.concatenate(x))
        with counted() as self.launches:
            y = OPS.recur(given, self.recurrent, self.cache.layer(0), step)
        return [y[end - (upto - start) : end] for (_, start, upto), end in zip(rows, host.query_start[1:], strict=True)]


@pytest.mark.parametrize("rule", ["delta", "scan", "gate"])
def test_bits_depend_neither_on_chunks_nor_on_other_rows_nor_on_padding(rule: RecurrentRule) -> None:
    layer = Layer(rule)
    whole = layer.compute((0, 0, TOKENS))[0]
    assert torch.isfinite(whole).all()
    layer = Layer(rule)
    found = layer.compute((0, 0, 7))
    found += layer.compute((1, 0, 9), (0, 7, 15))[1:]
    found += layer.compute((0, 15, 16), (1, 9, 12), width=3)[:1]
    layer.compute((0, 16, 18), (1, 12, 13), width=3)  # the second token is rejected
    found.append(whole[16:17])
    found += layer.compute((0, 17, 19), width=3)
    found += layer.compute((1, 12, 15), (0, 19, TOKENS))[1:]
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize("rule", ["scan", "gate"])
def test_launches_do_not_depend_on_the_tokens(rule: RecurrentRule) -> None:
    layer = Layer(rule)
    for tokens in (1, 5):
        layer.compute((0, 0, tokens))
        names = ["_convolve", "_walk_rows", "_norm_and_keep"] if rule == "scan" else ["_convolve", "_norm_and_keep"]
        assert layer.launches == [f"triton {name}" for name in names]


def test_padding_writes_no_state() -> None:
    layer = Layer("delta")
    layer.compute((0, 0, 5))
    blocks = np.arange(6, dtype=np.int32)
    before = layer.cache.export_blocks(blocks)
    layer.compute((0, 5, 5), width=2)
    np.testing.assert_array_equal(layer.cache.export_blocks(blocks), before)


@pytest.mark.parametrize("rule", ["delta", "gate"])
def test_tokens_after_a_state_that_is_not_theirs_are_nan_and_write_nothing(rule: RecurrentRule) -> None:
    layer = Layer(rule)
    layer.compute((0, 0, 5))
    blocks = np.arange(6, dtype=np.int32)
    before = layer.cache.export_blocks(blocks)
    wrong, right = layer.compute((0, 12, 14), (1, 0, 2))
    assert torch.isnan(wrong).all() and torch.isfinite(right).all()
    np.testing.assert_array_equal(layer.cache.export_blocks(blocks)[[1, 2]], before[[1, 2]])
