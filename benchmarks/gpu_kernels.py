"""Time the plugin's kernels next to libraries and floors: attention of mixed lengths, prompts, packed products.

    python benchmarks/gpu_kernels.py [--only decodes prompts products] [--output FILE]

Sizes are those of Llama-3.1-8B in bfloat16. Decodes are timed as replays of a captured graph, as in serving, and
compared with the time to read their keys and values; prompts with torch's fused attention on contiguous keys and
values; products with packed weights with torch's product in bfloat16. All inputs are random. Each result is also
compared with float32. Without a GPU, `--device cpu` computes small sizes by torch's operations, to try the script.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from harness.gpu_device import chip_of, device_facts
from harness.roofline import CHIPS

from fd_core.config import EngineConfig
from fd_core.ops.contract import Heads, KVShape, Rope, StepInput
from fd_core.ops.torch.ops import TorchOps
from fd_core.ops.weights import FP8, RawTensor
from fd_core.testing.models.arrays import packed_weight

RESULT = Path(__file__).resolve().parent / "results" / "gpu_kernels.json"
BLOCK = 32
LONGEST = 131072
"""Tokens of context that a captured decode has to be ready for."""
DECODES: dict[str, Sequence[int]] = {
    "1 x 1k": [1024],
    "32 x 1k": [1024] * 32,
    "256 x 1k": [1024] * 256,
    "32 x 8k": [8192] * 32,
    "17 x 8k": [8192] * 17,
    "1 x 64k": [65536],
    "15 x 1k, 1 x 64k": [1024] * 15 + [65536],
    "16 x 1k, 1 x 64k": [1024] * 16 + [65536],
}
DRAFTED = (5, 9)
"""Tokens of rows with drafts or forced tokens, 32 rows of 1k."""
PROMPTS: dict[str, Sequence[tuple[int, int]]] = {
    "2k": [(2048, 2048)],
    "8k": [(8192, 8192)],
    "64 after 32k": [(64, 32768 + 64)],
    "4 x 512 after 1k": [(512, 1536)] * 4,
    "2k next to 31 decodes of 1k": [(2048, 2048), *[(1, 1024)] * 31],
}
PRODUCTS = ((28672, 4096), (4096, 14336))
TOKENS = (1, 16, 32, 128, 512, 2048)
FORMS = ("int4", "int8", FP8)


class Device:
    """Device of the operations, and its clock."""

    def __init__(self, ops: Any, form: str = "bfloat16") -> None:
        self.ops, self.form = ops, form
        self.cuda = ops.device.type == "cuda"

    def normal(self, *shape: int) -> torch.Tensor:
        """Return random activations."""
        return torch.randn(*shape, dtype=self.ops.torch_dtype, device=self.ops.device)

    def seconds(self, work: Callable[[], Any], *, captured: bool = True) -> float:
        """Return seconds of one `work`: the median of seven rounds."""
        if not self.cuda:
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun
        work()
        torch.cuda.synchronize()
        replay = self._captured(work) if captured else work
        once = self._round(replay, 1)
        count = max(1, min(50, int(0.005 / max(once, 1e-6))))
        return median(self._round(replay, count) for _ in range(7))

    def _captured(self, work: Callable[[], Any]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def _round(self, work: Callable[[], Any], count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count


def step_of(ops: Any, rows: Sequence[tuple[int, int]], longest: int) -> tuple[StepInput, int]:
    """Return a step of (tokens, context) rows over blocks in random order, ready for `longest`, and its blocks."""
    from fd_gpu_cuda.providers import random_step

    step, blocks = random_step(ops, rows, BLOCK, 1000, np.random.default_rng(0))
    return replace(step, max_context=max(longest, step.max_context)), blocks


def attended(q: torch.Tensor, layer: Any, heads: Heads, step: StepInput, rows: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield the attention of some rows in float32, computed row by row."""
    host = step.host
    assert host is not None
    for row in rows:
        begin, end = host.query_start[row : row + 2]
        context = int(host.context_len[row])
        places = np.arange(context)
        at = torch.from_numpy(host.block_tables[row, places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK)
        keys, values = (side[at.to(q.device)].float().transpose(0, 1) for side in (layer.keys, layer.values))
        queries = q[begin:end].float().transpose(0, 1)
        seen = torch.arange(context, device=q.device)[None, :] <= torch.arange(context - (end - begin), context)[
            :, None
        ].to(q.device)
        groups = heads.num_heads // heads.num_kv_heads
        keys, values = (side.repeat_interleave(groups, 0) for side in (keys, values))
        scores = (queries @ keys.transpose(1, 2)) * heads.scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        yield (weights @ values).transpose(0, 1).flatten(1)


class Attention:
    """Times attention over one layer."""

    def __init__(self, device: Device, heads: Heads, bandwidth: float, operations: float) -> None:
        self._device, self._heads = device, heads
        self._bandwidth, self._operations = bandwidth, operations

    def __call__(
        self, name: str, rows: Sequence[tuple[int, int]], *, captured: bool, longest: int = 0
    ) -> dict[str, Any]:
        """Return one result."""
        device, ops, heads = self._device, self._device.ops, self._heads
        step, blocks = step_of(ops, rows, longest)
        cache = ops.allocate_kv(KVShape(1, heads.num_kv_heads, heads.head_dim, BLOCK), blocks)
        layer = cache.layer(0)
        layer.keys.normal_()
        layer.values.normal_()
        tokens = sum(count for count, _ in rows)
        q = device.normal(tokens, heads.num_heads, heads.head_dim)
        if captured:
            step = replace(step, host=None)
        found = {
            "name": name,
            "seconds": device.seconds(lambda: ops.paged_attention(q, layer, heads, step), captured=captured),
        }
        whole, _ = step_of(ops, rows, longest)
        looked = sorted({0, len(rows) // 2, len(rows) - 1})
        errors = []
        result = ops.paged_attention(q, layer, heads, step)
        for row, expected in zip(looked, attended(q, layer, heads, whole, looked), strict=True):
            begin, end = whole.host.query_start[row : row + 2]
            errors.append(float((result[begin:end].float() - expected).abs().max() / expected.abs().max()))
        item = layer.keys.element_size()
        moved = sum(context for _, context in rows) * 2 * heads.num_kv_heads * heads.head_dim * item
        moved += 2 * q.numel() * q.element_size()
        pairs = sum(count * (context - count) + count * (count + 1) / 2 for count, context in rows)
        worked = 4 * pairs * heads.num_heads * heads.head_dim
        floor = max(moved / self._bandwidth, worked / self._operations)
        found |= {"floor_s": floor, "ratio": found["seconds"] / floor, "error": max(errors)}
        found |= {"bytes_per_s": moved / found["seconds"], "operations_per_s": worked / found["seconds"]}
        return found

    def library(self, rows: Sequence[tuple[int, int]]) -> float:
        """Return seconds of torch's fused attention on contiguous keys and values; nan if rows differ."""
        (count, context), heads = rows[0], self._heads
        if any(each != rows[0] for each in rows):
            return float("nan")
        q = self._device.normal(len(rows), heads.num_heads, count, heads.head_dim)
        keys, values = (self._device.normal(len(rows), heads.num_heads, context, heads.head_dim) for _ in range(2))
        if count == context:
            return self._device.seconds(
                partial(torch.nn.functional.scaled_dot_product_attention, q, keys, values, is_causal=True)
            )
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(count, context)
        return self._device.seconds(
            partial(torch.nn.functional.scaled_dot_product_attention, q, keys, values, attn_mask=bias), captured=False
        )


def products(
    device: Device, bandwidth: float, shapes: Sequence[tuple[int, int]], counts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield times of products in all formats."""
    ops = device.ops
    for out, inputs in shapes:
        random = np.random.default_rng(1).standard_normal((1 << 20,), np.float32)
        plain = np.resize((random.view(np.uint32) >> 16).astype(np.uint16), (out, inputs))
        for form in ("bf16", *FORMS):
            weight = RawTensor("BF16", plain) if form == "bf16" else packed_weight(form, out, inputs)
            prepared = ops.prepare_linear([weight])
            values = None if form == "bf16" else torch.from_numpy(weight.to_float32()).to(ops.device)
            for tokens in counts:
                x = device.normal(tokens, inputs)
                seconds = device.seconds(partial(ops.linear, x, prepared))
                found = {"name": f"{form} {out}x{inputs}", "tokens": tokens, "seconds": seconds}
                bits = {"bf16": 16, "int4": 4}.get(form, 8)
                found |= {"weight_bytes_per_s": out * inputs * bits / 8 / seconds}
                found |= {"operations_per_s": 2 * out * inputs * tokens / seconds}
                if values is not None:
                    expected = x.float() @ values.T
                    found["error"] = float((ops.linear(x, prepared).float() - expected).std() / expected.std())
                yield found


def small(rows: Sequence[int], by: int) -> list[int]:
    """Return contexts divided by `by`, for a try on the CPU."""
    return [max(1, each // by) for each in rows]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("decodes", "prompts", "products")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=RESULT)
    chosen = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    if chosen.device == "cuda":
        from fd_gpu_cuda.backend import CudaBackend

        found |= device_facts()
        found["chip"] = chip_of(found["device"])
        ops: Any = CudaBackend(EngineConfig(model="none", dtype="bfloat16")).make_ops()
        chip = CHIPS[found["chip"] or "h100"]
        by, shapes, counts = 1, PRODUCTS, TOKENS
    else:
        ops, chip = TorchOps("bfloat16"), CHIPS["h100"]
        by, shapes, counts = 64, ((256, 128),), (1, 8)
    device = Device(ops)
    bandwidth, operations = chip.base.bandwidth, chip.peaks["bf16"]
    heads = Heads(32, 8, 128, 128**-0.5, Rope(None, None))
    attention = Attention(device, heads, bandwidth, operations)
    found |= {"bandwidth": bandwidth, "operations": operations, "results": []}

    def keep(part: str, result: dict[str, Any]) -> None:
        result = {"part": part} | result
        found["results"].append(result)
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        chosen.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in result.items()}
        print(json.dumps(shown), flush=True)

    failed = []
    for part in chosen.only:
        try:
            if part == "decodes":
                for name, contexts in DECODES.items():
                    rows = [(1, context) for context in small(contexts, by)]
                    keep(part, attention(name, rows, captured=True, longest=LONGEST // by))
                for tokens in DRAFTED:
                    rows = [(tokens, max(tokens, 1024 // by))] * 32
                    keep(part, attention(f"32 x {tokens} at 1k", rows, captured=True, longest=LONGEST // by))
            elif part == "prompts":
                for name, given in PROMPTS.items():
                    rows = [(max(1, count // by), max(1, context // by)) for count, context in given]
                    result = attention(name, rows, captured=False)
                    keep(part, result | {"library_s": attention.library(rows)})
            else:
                for result in products(device, bandwidth, shapes, counts):
                    keep(part, result)
        except Exception as error:  # noqa: BLE001 - one failed part must not stop the others
            failed.append(part)
            keep(part, {"failed": f"{type(error).__name__}: {error}"})
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
