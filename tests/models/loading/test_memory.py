"""Memory of a process while it loads a model most of which is its table."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from fd_core.ops.native import load_native_ops
from tests.models.loading.tiny_gguf import LLAMA, write_gguf

MEASURE = Path(__file__).resolve().parents[3] / "benchmarks" / "loading.py"
HIDDEN, INNER = 512, 256
BYTES = 96 << 20
"""Approximate size of the table: temporary memory is a few MB."""


@pytest.fixture
def dominated(tmp_path, request):
    """Write a llama of one layer with random blocks."""
    kind = GGMLQuantizationType[request.param]
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (BYTES // (HIDDEN // size * nbytes), HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    tensors = {
        f"{name}.weight": np.ones(HIDDEN, np.float32) for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")
    }
    for name, (rows, columns) in shapes.items():
        blocks = rng.integers(0, 64, (rows, columns // size * nbytes), np.uint8)  # scales and values are finite
        tensors[f"{name}.weight"] = blocks, kind
    sizes = {"embedding_length": HIDDEN, "feed_forward_length": INNER, "rope.dimension_count": HIDDEN // 4}
    values = {**LLAMA, **sizes, "context_length": 512}
    return write_gguf(tmp_path / "dominated.gguf", values=values, tensors=tensors)


@pytest.mark.parametrize(
    "dominated",
    [*(pytest.param(name, marks=pytest.mark.soak) for name in ("Q4_0", "Q8_0")), "Q4_K", "BF16"],
    indirect=True,
)
def test_loading_needs_at_most_a_fifth_more_than_the_file(dominated):
    if load_native_ops("bfloat16", 1) is None:
        pytest.skip("the native kernels cannot be built here")
    made = subprocess.run(
        [sys.executable, MEASURE, dominated, "--here"], check=True, capture_output=True, text=True, timeout=120
    )
    found = json.loads(made.stdout.splitlines()[-1])
    assert found["peak ratio"] < 1.2, found
    assert 0 <= found["private"] - found["reported"] < 12, found  # what the loader and the allocator keep
