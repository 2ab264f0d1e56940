"""Compare prefill attention with torch's flash attention on a GPU: results, milliseconds and TFLOP/s.

    python benchmarks/gpu_offline/probes/prefill_attention.py [--cpu]

Heads of Llama-3.1-8B in bfloat16, blocks of 32 tokens. Prints one JSON line per result and takes less than a minute.
`--cpu` computes small cases in Triton's interpreter instead, to test this script.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

CPU = "--cpu" in sys.argv[1:]
if CPU:
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402 - Triton reads the variable when it is imported
import torch  # noqa: E402
import triton  # noqa: E402
from fd_gpu_cuda.kernels import attention as kernels  # noqa: E402
from fd_gpu_cuda.kernels.attention import PagedAttention, Tile  # noqa: E402
from fd_gpu_cuda.kv_cache import CudaLayer  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from fd_core.ops.contract import Heads, HostStep, Rope, StepInput  # noqa: E402

DEVICE, DTYPE = ("cpu", torch.float32) if CPU else ("cuda", torch.bfloat16)
SHAPE = (4, 1, 16) if CPU else (32, 8, 128)
"""Query heads, KV heads and width."""
BLOCK_SIZE = 32
TILES: tuple[dict[str, int], ...] = ({},)
TOLERANCE = 1e-5 if CPU else 2e-2
CASES = {
    "2k": (1, 40, 40),
    "8k": (1, 70, 70),
    "64 after 32k": (1, 12, 1100),
    "4 x 512 after 1k": (4, 20, 60),
}
"""Rows, and the tokens and context of each."""
if not CPU:
    CASES = {
        "2k": (1, 2048, 2048),
        "8k": (1, 8192, 8192),
        "64 after 32k": (1, 64, 32 * 1024 + 64),
        "4 x 512 after 1k": (4, 512, 1536),
    }
    TILES = ({}, {"lines": 64, "num_warps": 4}, {"keys": 32}, {"num_stages": 3})


class Case(NamedTuple):
    q: Any
    """[rows * tokens, heads, width]"""
    layer: CudaLayer
    heads: Heads
    step: StepInput
    dense: tuple[Any, Any, Any]
    """Queries, keys and values [rows, heads, tokens, width]; the KV heads are repeated."""

    def part(self, begin: int, end: int) -> tuple[Any, StepInput]:
        """Return queries and step of a chunk of the only row."""
        tokens, context = len(self.q), self.step.max_context
        step = step_of(1, end - begin, context - tokens + end, self.step.block_tables)
        return self.q[begin:end].contiguous(), step


def step_of(rows: int, tokens: int, context: int, tables: Any) -> StepInput:
    start, contexts = np.arange(rows + 1, dtype=np.int32) * tokens, np.full(rows, context, np.int32)
    on_device = [torch.from_numpy(array).to(DEVICE) for array in (start, contexts)]
    unused = on_device[1]
    return StepInput(
        token_ids=unused,
        positions=unused,
        kv_slots=unused,
        query_start=on_device[0],
        context_len=on_device[1],
        block_tables=tables,
        logits_rows=unused,
        max_query=tokens,
        max_context=context,
        host=HostStep(start, contexts, np.zeros((rows, 0), np.int32)),
    )


def case_of(rows: int, tokens: int, context: int, shape: tuple[int, int, int] = SHAPE) -> Case:
    heads, kv_heads, width = shape
    torch.manual_seed(0)
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.randperm(rows * blocks).reshape(rows, blocks).to(DEVICE, torch.int32)
    q = torch.randn(rows * tokens, heads, width, device=DEVICE, dtype=DTYPE)
    pool = [torch.randn(rows * blocks * BLOCK_SIZE, kv_heads, width, device=DEVICE, dtype=DTYPE) for _ in range(2)]
    place = torch.arange(context, device=DEVICE)
    slots = tables[:, place // BLOCK_SIZE].long() * BLOCK_SIZE + place % BLOCK_SIZE
    k, v = (side[slots].transpose(1, 2).repeat_interleave(heads // kv_heads, 1).contiguous() for side in pool)
    dense = q.view(rows, tokens, heads, width).transpose(1, 2).contiguous(), k, v
    given = Heads(heads, kv_heads, width, width**-0.5, Rope(None, None))
    return Case(q, CudaLayer(*pool, BLOCK_SIZE), given, step_of(rows, tokens, context, tables), dense)


def flash(case: Case) -> Any:
    q, k, v = case.dense
    mask = causal_lower_right(q.shape[2], k.shape[2])
    with sdpa_kernel(SDPBackend.MATH if CPU else SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def milliseconds(compute: Callable[[], Any]) -> float:
    """Return the median of 20 runs; the L2 cache is overwritten in between."""
    if CPU:
        compute()
        return 1.0
    cache = torch.empty(256 * 2**20, dtype=torch.uint8, device=DEVICE)
    compute()
    times = []
    for _ in range(20):
        cache.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        compute()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def rated(case: Case, compute: Callable[[], Any]) -> dict[str, float]:
    rows, heads, tokens, width = case.dense[0].shape
    pairs = rows * tokens * (case.step.max_context - (tokens - 1) / 2)
    ms = milliseconds(compute)
    return {"ms": round(ms, 4), "tflops": round(4 * pairs * heads * width / ms / 1e9, 1)}


def show(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def with_tile(attend: Any, case: Case, **changes: Any) -> Callable[[], Any]:
    """Return a computation with another tiling."""

    def compute() -> Any:
        usual = kernels.prefill_tile

        def other(*arguments: Any) -> Tile:
            tile: Tile = usual(*arguments)
            lines = changes.get("lines", tile.lines)
            queries = tile.queries * lines // tile.lines
            return tile._replace(queries=queries, **changes)

        kernels.prefill_tile = other
        try:
            return attend(case.q, case.layer, case.heads, case.step)
        finally:
            kernels.prefill_tile = usual

    return compute


def main() -> None:
    limit, multiprocessors = 227 * 1024, 132
    if not CPU:
        from triton.runtime import driver

        limit = driver.active.utils.get_device_properties(0)["max_shared_mem"]
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    name = "CPU" if CPU else torch.cuda.get_device_name()
    show(device=name, torch=torch.__version__, triton=triton.__version__)
    attend: Any = PagedAttention(torch.device(DEVICE), multiprocessors, limit)
    alone: Any = PagedAttention(torch.device(DEVICE), 1, limit)
    for label, (rows, tokens, context) in CASES.items():
        case = case_of(rows, tokens, context)

        def compute(case: Case = case) -> Any:
            return attend(case.q, case.layer, case.heads, case.step)

        found = compute()
        expected = flash(case).transpose(1, 2).reshape(found.shape)
        error = float((found.float() - expected.float()).abs().max())
        (division,) = attend._divisions.values()
        same = torch.equal(alone(case.q, case.layer, case.heads, case.step), found)
        facts: dict[str, Any] = {"close": error < TOLERANCE, "error": error, "same_bits_undivided": same}
        if rows == 1 and not CPU:  # numpy's products depend on the number of lines
            half = tokens // 2 if tokens > 2 * kernels.MOST_DRAFTED + 1 else tokens
            parts = [case.part(begin, end) for begin, end in ((0, half), (half, tokens)) if begin < end]
            pieces = [attend(q, case.layer, case.heads, step) for q, step in parts]
            facts["same_bits_in_chunks"] = torch.equal(torch.cat(pieces), found)
        ours, theirs = rated(case, compute), rated(case, lambda case=case: flash(case))
        show(case=label, programs=division.programs, **facts, ours=ours, flash=theirs, ratio=ours["ms"] / theirs["ms"])
    for shape in (SHAPE,) if CPU else (SHAPE, (32, 8, 64)):
        case = case_of(*CASES["8k"], shape)
        for changes in TILES:
            show(shape=shape, tile=changes, **rated(case, with_tile(attend, case, **changes)))


if __name__ == "__main__":
    main()
