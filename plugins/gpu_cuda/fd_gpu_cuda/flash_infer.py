"""Attention by FlashInfer for steps that are not replayed: it plans on the host, so it takes the host's metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fd_core.ops.contract import Array, Heads, HostStep, StepInput
from fd_core.types import IntArray

from fd_gpu_cuda.device import Cuda
from fd_gpu_cuda.kv_cache import CudaLayer

_WORKSPACE_BYTES = 128 * 2**20


class FlashInferAttention:
    """One plan for each geometry of a step's layers, made when the first such layer asks.

    Its calls fit the releases whose parameters `tests/test_flash_infer_calls.py` records.
    """

    def __init__(self, flashinfer: Any, cuda: Cuda) -> None:
        self._flashinfer = flashinfer
        self._cuda = cuda
        self._workspace: Array | None = None
        self._wrappers: dict[tuple[Any, ...], Any] = {}
        self._step: StepInput | None = None
        self._planned: set[tuple[Any, ...]] = set()
        self._copied: dict[tuple[Any, ...], Callable[[], None]] = {}
        """By geometry a wait for its last plan to be on the device."""

    def __call__(self, q: Array, layer: CudaLayer, heads: Heads, step: StepInput) -> Array:
        """Attend with q [T, nh, d], float16 or bfloat16; returns [T, nh * d]. `step.host` must be there."""
        if step is not self._step:
            self._step = step
            self._planned.clear()
        sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim, layer.block_size)
        geometry = (sizes, heads.scale, heads.window, heads.softcap, q.dtype)
        if geometry not in self._wrappers:
            if self._workspace is None:
                self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._cuda.device)
            made = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers[geometry] = made
        wrapper = self._wrappers[geometry]
        if geometry not in self._planned:
            if step.host is None:
                raise RuntimeError("FlashInfer plans on the host, but the step has no metadata there")
            if geometry in self._copied:
                # A plan is copied from pinned memory of its wrapper, which the next plan overwrites: where steps are
                # launched ahead, the copy may still be queued. All that is before it belongs to older steps.
                self._copied[geometry]()
            lists = (step.host.query_start.copy(), *page_lists(step.host, layer.block_size))
            wrapper.plan(
                *map(torch.from_numpy, lists),
                *sizes,
                causal=True,
                sm_scale=heads.scale,
                window_left=-1 if heads.window is None else heads.window - 1,
                logits_soft_cap=heads.softcap,
                q_data_type=q.dtype,
                kv_data_type=q.dtype,
            )
            self._copied[geometry] = self._cuda.mark()
            self._planned.add(geometry)
        pages = (-1, layer.block_size)
        output = wrapper.run(q.contiguous(), (layer.keys.unflatten(0, pages), layer.values.unflatten(0, pages)))
        return output.flatten(1)


def page_lists(host: HostStep, block_size: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return where each row's pages begin int32[N + 1], all pages int32, and tokens in each last page int32[N]."""
    counts = -(-host.context_len // block_size)
    starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    used = np.arange(host.block_tables.shape[1]) < counts[:, None]
    last = host.context_len - (counts - 1) * block_size
    return starts, host.block_tables[used].astype(np.int32), last.astype(np.int32)
