"""A mixture of experts as operators: tokens are sorted by expert, so that each expert computes only its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto

from fd_core.ops.contract import Experts
from fd_core.ops.onnx_graph.graph import Graph, GraphSymbol


def route(graph: Graph, x: GraphSymbol, experts: Experts) -> tuple[GraphSymbol, GraphSymbol]:
    """Emit the choice: x [T, H] -> experts int64[T, top_k] and weights float32[T, top_k]."""
    scores = graph.op("Softmax", graph.op("Gemm", x, graph.weight(experts.router), transB=1), axis=-1)
    ranked = scores
    if experts.correction_bias is not None:
        ranked = graph.op("Add", scores, graph.weight(experts.correction_bias))
    _, chosen = graph.ops("TopK", 2, ranked, graph.integers(experts.top_k), axis=-1)
    weights = graph.op("GatherElements", scores, chosen, axis=1)
    if experts.normalize:
        mass = graph.op("ReduceSum", weights, graph.integers(1), keepdims=1)
        weights = graph.op("Div", weights, graph.op("Max", mass, graph.constant(experts.norm_floor, np.float32)))
    return chosen, weights


def routed_experts(
    graph: Graph, x: GraphSymbol, experts: Experts, compute: Callable[[GraphSymbol, Any, Any], GraphSymbol]
) -> GraphSymbol:
    """Emit the weighted sum over each token's experts, [T, H] -> [T, H].

    `compute(x, gate_up, down)` emits one expert. An expert that no token chose computes on no rows.
    """
    count = len(experts.gate_up)
    chosen, weights = route(graph, x, experts)
    # hits [experts, T] is 1 where a token chose an expert; its places in order are the tokens sorted by expert.
    numbers = graph.constant(np.arange(count)[:, None, None], np.int64)
    hits = graph.op("Cast", graph.op("Equal", numbers, chosen), to=TensorProto.INT64)
    hits = graph.op("ReduceSum", hits, graph.integers(2), keepdims=0)
    _, tokens = graph.ops("Split", 2, graph.op("NonZero", hits), axis=0, num_outputs=2)
    mine = graph.op("Gather", x, graph.op("Squeeze", tokens, graph.integers(0)))
    sizes = graph.op("ReduceSum", hits, graph.integers(1), keepdims=0)
    parts = graph.ops("Split", count, mine, sizes, axis=0)
    outputs = [
        compute(part, gate_up, down) for part, gate_up, down in zip(parts, experts.gate_up, experts.down, strict=True)
    ]
    sorted_outputs = graph.op("Concat", *outputs, axis=0)
    # Where the output of (expert, token) lies: how many hits come up to it, less one; read for each token's choices.
    so_far = graph.op("CumSum", graph.reshape(hits, -1), graph.constant(0, np.int64))
    lies = graph.op("Sub", so_far, graph.constant(1, np.int64))
    per_token = graph.op("Transpose", graph.op("Reshape", lies, graph.op("Shape", hits)), perm=[1, 0])
    places = graph.op("GatherElements", per_token, chosen, axis=1)
    weighted = graph.op(
        "Mul", graph.op("Gather", sorted_outputs, places), graph.op("Unsqueeze", weights, graph.integers(2))
    )
    return graph.op("ReduceSum", weighted, graph.integers(1), keepdims=0)
