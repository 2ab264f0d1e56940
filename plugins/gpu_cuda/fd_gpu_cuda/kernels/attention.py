"""Paged attention: which kernels compute a step.

Which kernel computes a row depends on the row alone: by its number of tokens it is a decode or a part of a prompt, and
the bits of its attention are the same alone, between decodes and beside prompts.
"""

from __future__ import annotations

from functools import cache

import torch
from fd_core.ops.contract import Array, Heads, StepInput

from fd_gpu_cuda.kernels.attention_tiles import MOST_DRAFTED, HeadSizes, decode_tile, prefill_tile
from fd_gpu_cuda.kernels.decode_attention import DecodeWorkspace, decode_attention
from fd_gpu_cuda.kernels.prefill_attention import prefill_attention
from fd_gpu_cuda.kv_cache import CudaLayer

_decode_tile, _prefill_tile = cache(decode_tile), cache(prefill_tile)


class PagedAttention:
    """Attention on one device; one launch for decodes with or without drafts, and two where prompts are beside them."""

    def __init__(self, device: torch.device, multiprocessors: int, shared_memory: int) -> None:
        """Take workspaces; `shared_memory` is the most that one program can have, in bytes."""
        self._space = DecodeWorkspace(device, multiprocessors)
        self._shared_memory = shared_memory

    def __call__(self, q: Array, layer: CudaLayer, heads: Heads, step: StepInput) -> Array:
        """Attend with q [T, nh, d] over each row's blocks; returns [T, nh * d]. Waits for nothing."""
        q = q.contiguous()
        output = torch.empty_like(q)
        shared, item = heads.num_heads // heads.num_kv_heads, layer.keys.element_size()
        sizes = HeadSizes(shared, heads.head_dim, item, q.element_size(), heads.window is not None)
        prompts = step.max_query > MOST_DRAFTED
        if not prompts or len(step.context_len) > 1:
            tile = _decode_tile(sizes, self._shared_memory)
            decode_attention(q, layer, heads, step, output, tile, MOST_DRAFTED, self._space)
        if prompts:
            tile = _prefill_tile(sizes, self._shared_memory)
            prefill_attention(q, layer, heads, step, output, tile, MOST_DRAFTED + 1)
        return output.flatten(1)
