"""Time decode attention on a GPU, and compare it with a float32 reference and with torch's own attention.

    python benchmarks/gpu_offline/probes/decode_attention.py [--cpu] [--no-sweep]

Heads of Llama-3.1-8B in bfloat16, blocks of 32 tokens, random keys and values. Launches are replayed from a CUDA graph
that was captured for the longest context. Prints one JSON line per result and takes less than a minute. `--cpu`
computes small cases in Triton's interpreter instead, to test this script.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

CPU = "--cpu" in sys.argv[1:]
if CPU:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402 - Triton reads the variable when it is imported
import triton  # noqa: E402
from fd_gpu_cuda.kernels import attention as kernels  # noqa: E402
from fd_gpu_cuda.kernels.attention import PagedAttention  # noqa: E402
from fd_gpu_cuda.kv_cache import CudaLayer  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from fd_core.ops.contract import Heads, Rope, StepInput  # noqa: E402

DEVICE, DTYPE = ("cpu", torch.float32) if CPU else ("cuda", torch.bfloat16)
HEADS = Heads(4, 1, 16, 16**-0.5, Rope(None, None)) if CPU else Heads(32, 8, 128, 128**-0.5, Rope(None, None))
BLOCK_SIZE = 32
LONGEST = 2048 if CPU else 131072
"""Context for which launches are captured."""
TOLERANCE = 1e-5 if CPU else 2e-2
"""Largest error, relative to the spread of the results."""
BANDWIDTH = 3.0e12
K = 16 if CPU else 1024
CASES = {
    "1 @ 1k": (1, [K]),
    "32 @ 1k": (1, [K] * 32),
    "256 @ 1k": (1, [K] * (33 if CPU else 256)),
    "1 @ 64k": (1, [64 * K]),
    "15 @ 1k, 1 @ 64k": (1, [K] * 15 + [64 * K]),
    "16 @ 1k, 1 @ 64k": (1, [K] * 16 + [64 * K]),
    "17 @ 8k": (1, [8 * K] * 17),
    "255 of up to 2k": (1, [max(1, 2 * K * row // 255) for row in range(1, 256, 32 if CPU else 1)]),
    "28 @ 1k, 9 tokens": (9, [K] * 28),
    "16 @ 8k, 9 tokens": (9, [8 * K] * (2 if CPU else 16)),
}
"""Tokens of a row, and the context of each row."""
SWEPT = ("1 @ 1k", "32 @ 1k", "256 @ 1k", "15 @ 1k, 1 @ 64k", "17 @ 8k", "16 @ 8k, 9 tokens")
VARIANTS: tuple[dict[str, int], ...] = ({"programs": 1},)
if not CPU:
    VARIANTS = (
        {"programs": 1},
        {"programs": 3},
        {"programs": 4},
        {"num_stages": 5},
        {"num_stages": 5, "programs": 3},
        {"num_stages": 6},
        {"maxnreg": 168, "programs": 3},
        {"maxnreg": 168, "num_stages": 5},
        {"maxnreg": 128, "programs": 4},
    )
"""Shares per multiprocessor, loads in flight and registers; none of them changes the bits."""


class Pool:
    """Keys and values that all cases share, longer than any."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = max(sum(-(-context // BLOCK_SIZE) for context in contexts) for _, contexts in CASES.values())
        size = blocks * BLOCK_SIZE, HEADS.num_kv_heads, HEADS.head_dim
        self.layer = CudaLayer(*(torch.randn(size, device=DEVICE, dtype=DTYPE) for _ in range(2)), BLOCK_SIZE)
        self.order = torch.randperm(blocks).to(DEVICE, torch.int32)

    def step(self, tokens: int, contexts: list[int]) -> StepInput:
        """Return a step of scattered blocks."""
        tables = torch.zeros(len(contexts), -(-max(contexts) // BLOCK_SIZE), device=DEVICE, dtype=torch.int32)
        begin = 0
        for row, context in enumerate(contexts):
            blocks = -(-context // BLOCK_SIZE)
            tables[row, :blocks] = self.order[begin : begin + blocks]
            begin += blocks
        lengths = torch.tensor(contexts, device=DEVICE, dtype=torch.int32)
        return StepInput(
            token_ids=lengths,
            positions=lengths,
            kv_slots=lengths,
            query_start=torch.arange(len(contexts) + 1, device=DEVICE, dtype=torch.int32) * tokens,
            context_len=lengths,
            block_tables=tables,
            logits_rows=lengths,
            max_query=tokens,
            max_context=LONGEST,
            uniform=True,
        )

    def row(self, step: StepInput, row: int, context: int) -> tuple[Any, Any]:
        """Return the keys and values of a row, [KV heads, context, width]."""
        place = torch.arange(context, device=DEVICE)
        slots = step.block_tables[row, place // BLOCK_SIZE].long() * BLOCK_SIZE + place % BLOCK_SIZE
        return self.layer.keys[slots].transpose(0, 1), self.layer.values[slots].transpose(0, 1)


def only(step: StepInput, row: int) -> StepInput:
    """Return a step of one of the rows."""
    lengths, tables = step.context_len[row : row + 1], step.block_tables[row : row + 1]
    return replace(step, query_start=step.query_start[:2], context_len=lengths, block_tables=tables)


def expected(pool: Pool, q: Any, step: StepInput, tokens: int, row: int, context: int) -> Any:
    """Return the results of one row in float32, [tokens, heads * width]."""
    k, v = (side.float() for side in pool.row(step, row, context))
    queries = q[row * tokens : (row + 1) * tokens].float().unflatten(1, (HEADS.num_kv_heads, -1))
    scores = torch.einsum("thgd,hsd->hgts", queries, k) * HEADS.scale
    place = torch.arange(context, device=DEVICE)
    hidden = place[None, :] > context - tokens + torch.arange(tokens, device=DEVICE)[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hgts,hsd->thgd", weights, v).flatten(1)


def replayed(compute: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a capture of one run."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    return graph.replay


def microseconds(compute: Callable[[], Any], runs: int = 20) -> float:
    """Return the median of several runs; the L2 cache is overwritten in between."""
    if CPU:
        compute()
        return 1.0
    replay, cache = replayed(compute), torch.empty(128 * 2**20, dtype=torch.uint8, device=DEVICE)
    times = []
    for _ in range(runs):
        cache.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def rated(contexts: list[int], compute: Callable[[], Any]) -> dict[str, float]:
    read = 2 * sum(contexts) * HEADS.num_kv_heads * HEADS.head_dim * (4 if CPU else 2)
    took = microseconds(compute)
    return {"us": round(took, 1), "gb_per_s": round(read / took / 1e3), "floor_us": round(1e6 * read / BANDWIDTH, 1)}


def torch_attention(pool: Pool, q: Any, step: StepInput, contexts: list[int]) -> Callable[[], Any] | None:
    """Return torch's attention over keys and values in one piece; None for rows of different lengths."""
    if CPU or len(set(contexts)) > 1 or step.max_query > 1:
        return None
    rows = [pool.row(step, row, context) for row, context in enumerate(contexts)]
    k, v = (torch.stack(side).contiguous() for side in zip(*rows, strict=True))
    return lambda: scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)


@contextmanager
def varied(programs: int = 2, **options: int) -> Iterator[None]:
    """Launch with other options in the block."""
    usual = kernels._constants
    with (
        mock.patch.object(kernels, "_PROGRAMS", programs),
        mock.patch.object(kernels, "_constants", lambda *given: usual(*given) | options),
    ):
        yield


def new_attention() -> PagedAttention:
    if CPU:
        return PagedAttention(torch.device("cpu"), 4, 227 * 1024)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    limit = triton.runtime.driver.active.utils.get_device_properties(0)["max_shared_mem"]
    return PagedAttention(torch.device(DEVICE), multiprocessors, limit)


def show(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    name = "cpu" if CPU else torch.cuda.get_device_name(0)
    show(device=name, torch=torch.__version__, triton=triton.__version__)
    pool, attend = Pool(), new_attention()
    for case, (tokens, contexts) in CASES.items():
        step = pool.step(tokens, contexts)
        q = torch.randn(len(contexts) * tokens, HEADS.num_heads, HEADS.head_dim, device=DEVICE, dtype=DTYPE)

        def compute(q: Any = q, step: StepInput = step) -> Any:
            return attend(q, pool.layer, HEADS, step)

        found = compute()
        error = 0.0
        for row in {0, len(contexts) // 2, len(contexts) - 1}:
            wanted = expected(pool, q, step, tokens, row, contexts[row])
            own = found[row * tokens : (row + 1) * tokens].float()
            error = max(error, float((own - wanted).abs().max() / wanted.std()))
        alone = attend(q[-tokens:].contiguous(), pool.layer, HEADS, only(step, len(contexts) - 1))
        facts = rated(contexts, compute) | {"error": error, "accurate": error < TOLERANCE}
        facts |= {"same_alone": torch.equal(alone, found[-tokens:]), "same_again": torch.equal(compute(), found)}
        if (theirs := torch_attention(pool, q, step, contexts)) is not None:
            facts["torch_us"] = round(microseconds(theirs), 1)
        show(case=case, **facts)
        if "--no-sweep" not in sys.argv[1:] and case in SWEPT:
            for variant in VARIANTS:
                with varied(**variant):
                    other = new_attention()

                    def vary(other: Any = other, q: Any = q, step: StepInput = step) -> Any:
                        return other(q, pool.layer, HEADS, step)

                    try:
                        same = torch.equal(vary(), found)
                        show(case=case, variant=variant, same=same, **rated(contexts, vary))
                    except Exception as error:  # noqa: BLE001 - a variant may need too much shared memory
                        show(case=case, variant=variant, failure=f"{type(error).__name__}: {error}"[:200])


if __name__ == "__main__":
    main()
