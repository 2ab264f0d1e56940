"""Arguments passed to FlashInfer, whose page lists must address the right keys."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fd_core.ops.contract import Heads, HostStep, Rope, StepInput  # noqa: E402 - only where torch is installed
from fd_core.ops.torch.attention import TorchLayer  # noqa: E402
from fd_core.testing.models.arrays import Values, step_input  # noqa: E402
from processor import Processor, ids, plain_attention  # noqa: E402

from fd_gpu_cuda.providers import FlashInferAttention, page_lists  # noqa: E402


class Wrapper:
    """Attends by page lists, one row after the other."""

    plans = 0

    def __init__(self, workspace: Any, layout: str) -> None:
        assert layout == "NHD"

    def plan(self, queries: Any, starts: Any, pages: Any, last: Any, *sizes: int, **options: Any) -> None:
        assert all(array.dtype == torch.int32 and not array.is_cuda for array in (queries, starts, pages, last))
        assert options["causal"]
        Wrapper.plans += 1
        self.lists, self.sizes, self.options = (queries, starts, pages, last), sizes, options

    def run(self, q: Any, kv: tuple[Any, Any]) -> Any:
        queries, starts, pages, last = (array.tolist() for array in self.lists)
        _, nkv, _, size = self.sizes
        output = torch.empty_like(q)
        for row in range(len(last)):
            mine = pages[starts[row] : starts[row + 1]]
            context = (len(mine) - 1) * size + last[row]
            keys, values = (part[mine].flatten(0, 1)[:context] for part in kv)
            own = q[queries[row] : queries[row + 1]].unflatten(1, (nkv, -1))
            distance = context - len(own) + torch.arange(len(own))[:, None] - torch.arange(context)
            seen = (distance >= 0) & ((distance <= self.options["window_left"]) | (self.options["window_left"] < 0))
            scores = torch.einsum("tkgd,skd->tkgs", own, keys) * self.options["sm_scale"]
            cap = self.options["logits_soft_cap"]
            scores = scores if cap is None else (scores / cap).tanh() * cap
            weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(dim=-1)
            output[queries[row] : queries[row + 1]] = torch.einsum("tkgs,skd->tkgd", weights, values).flatten(1, 2)
        return output


def test_page_lists_hold_the_blocks_of_a_context() -> None:
    host = HostStep(ids(0, 1, 4), ids(9, 4), np.array([[7, 2, 5, 99], [3, 99, 99, 99]], np.int32))
    starts, pages, last = page_lists(host, 4)
    assert (starts.tolist(), pages.tolist(), last.tolist()) == ([0, 3, 4], [7, 2, 5, 3], [1, 4])


def test_each_geometry_is_planned_once_a_step() -> None:
    values = Values(3)
    tables = np.random.default_rng(0).permutation(24).reshape(3, 8).astype(np.int32)
    numbers = step_input([(3, 20), (1, 4), (5, 5)], 4, tables)
    layer = TorchLayer(torch.from_numpy(values(96, 2, 8)), torch.from_numpy(values(96, 2, 8)), 4)
    q = torch.from_numpy(values(9, 4, 8))
    attend = FlashInferAttention(SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper), Processor())
    plain, narrow = Heads(4, 2, 8, 0.3, Rope(None, None)), Heads(4, 2, 8, 0.3, Rope(None, None), window=6, softcap=3.0)
    Wrapper.plans = 0
    for planned in (3, 6):
        first = on_both(numbers)
        other = replace(first, group=1, block_tables=first.block_tables.flip(0))
        other = replace(other, host=replace(first.host, block_tables=numbers.block_tables[::-1]))
        for heads, step in [(plain, first), (narrow, first), (plain, other)] * 2:
            torch.testing.assert_close(attend(q, layer, heads, step), plain_attention(q, layer, heads, step))
        assert Wrapper.plans == planned


def on_both(numbers: StepInput) -> StepInput:
    """Return a step whose arrays are tensors, together with the arrays of the host."""
    host = HostStep(numbers.query_start, numbers.context_len, numbers.block_tables)
    arrays = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name in StepInput.__dataclass_fields__
        for value in [getattr(numbers, name)]
    }
    return StepInput(**(arrays | {"host": host}))
