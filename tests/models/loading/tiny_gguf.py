"""Tiny GGUF files, written with the `gguf` package as converters do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fd_core.testing.models.families import gguf_files

LLAMA = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 8,
}


def write_gguf(
    path: Path,
    *,
    arch: str = "llama",
    values: Mapping[str, Any] = LLAMA,
    tensors: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write metadata (`values` get the architecture's prefix) and tensors: arrays, or (bytes, type) pairs."""
    metadata = {f"{arch}.{key}": value for key, value in values.items()} | dict(extra or {})
    return gguf_files.write_gguf(path, arch, metadata, llama_tensors() if tensors is None else tensors)


def llama_tensors() -> dict[str, np.ndarray]:
    """Return the tensors of a one-layer llama with the shape of `LLAMA` and tied embeddings."""
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (48, 32),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64),
        "output_norm.weight": (32,),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
