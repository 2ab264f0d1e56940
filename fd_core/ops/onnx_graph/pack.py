"""The onnx pack: `Ops` as operators of a graph.

Each primitive is written once, as the operators it emits. Called with symbols it appends them to the traced graph, and
`compile` runs the whole forward as one session; called with arrays it runs a separate graph at once. Arrays, prepared
weights, sampling and verification are those of the numpy pack: ONNX Runtime computes on the memory of numpy arrays, and
returns logits as one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from fd_core.ops.contract import (
    CLAMP,
    Activation,
    Array,
    Experts,
    Forward,
    GroupTables,
    Heads,
    KVCache,
    KVShape,
    Lora,
    Norm,
    Ops,
    PlainActivation,
    Rope,
    StepInput,
)
from fd_core.ops.numpy.ops import NumpyKVCache, NumpyLinear, NumpyOps
from fd_core.ops.onnx_graph import attention
from fd_core.ops.onnx_graph.graph import Graph, GraphSymbol, TraceError
from fd_core.ops.onnx_graph.session import CPU, Binding, PlanKey, Provider, Session, TracedCache, TracedLayer, bound
from fd_core.ops.parallel import RankGroup, Stage


def route(graph: Graph, x: GraphSymbol, experts: Experts) -> tuple[GraphSymbol, GraphSymbol]:
    """Emit the routing: x [T, H] -> experts int64[T, top_k] and weights float32[T, top_k]."""
    bias = None if experts.router_bias is None else graph.weight(experts.router_bias)
    ranked = graph.op("Gemm", x, graph.weight(experts.router), bias, transB=1)
    sigmoid = experts.scoring == "sigmoid"
    scores = graph.op("Sigmoid", ranked) if sigmoid else graph.op("Softmax", ranked, axis=-1)
    if experts.correction_bias is not None:  # otherwise products: scores of large ones round to 1, but differ
        ranked = graph.op("Add", scores, graph.weight(experts.correction_bias))
    if experts.top_groups < experts.groups:
        ranked = _within_groups(graph, ranked, experts)
    _, chosen = graph.ops("TopK", 2, ranked, graph.integers(experts.top_k), axis=-1)
    weights = graph.op("GatherElements", scores, chosen, axis=1)
    if experts.normalize:
        mass = graph.op("ReduceSum", weights, graph.integers(1), keepdims=1)
        weights = graph.op("Div", weights, graph.op("Max", mass, graph.constant(experts.norm_floor, np.float32)))
    if experts.weight_scale != 1.0:
        weights = graph.op("Mul", weights, graph.constant(experts.weight_scale, np.float32))
    return chosen, weights


def _within_groups(graph: Graph, ranked: GraphSymbol, experts: Experts) -> GraphSymbol:
    """Exclude the experts outside each token's best groups: [T, experts] -> [T, experts]."""
    count = len(experts.gate_up)
    groups = graph.reshape(ranked, -1, experts.groups, count // experts.groups)
    summed = 1 if experts.correction_bias is None else 2
    best, _ = graph.ops("TopK", 2, groups, graph.integers(summed), axis=2)
    best = graph.op("ReduceSum", best, graph.integers(2), keepdims=0)
    _, chosen = graph.ops("TopK", 2, best, graph.integers(experts.top_groups), axis=1)
    numbers = graph.constant(np.arange(experts.groups)[:, None], np.int64)
    hits = graph.op("Equal", numbers, graph.op("Unsqueeze", chosen, graph.integers(1)))
    hits = graph.op("ReduceMax", graph.op("Cast", hits, to=TensorProto.INT64), graph.integers(2))
    within = graph.op("Cast", hits, to=TensorProto.BOOL)
    return graph.reshape(graph.op("Where", within, groups, graph.constant(-np.inf, np.float32)), -1, count)


def routed_experts(
    graph: Graph, x: GraphSymbol, experts: Experts, compute: Callable[[GraphSymbol, Any, Any], GraphSymbol]
) -> GraphSymbol:
    """Emit the weighted sum over each token's experts, [T, H] -> [T, H].

    `compute(x, gate_up, down)` emits one expert. An expert without tokens computes on no rows.
    """
    count = len(experts.gate_up)
    chosen, weights = route(graph, x, experts)
    # hits [experts, T] is 1 if a token uses an expert; its nonzero indices are the tokens sorted by expert.
    numbers = graph.constant(np.arange(count)[:, None, None], np.int64)
    hits = graph.op("Cast", graph.op("Equal", numbers, chosen), to=TensorProto.INT64)
    hits = graph.op("ReduceSum", hits, graph.integers(2), keepdims=0)
    _, tokens = graph.ops("Split", 2, graph.op("NonZero", hits), axis=0, num_outputs=2)
    mine = graph.op("Gather", x, graph.op("Squeeze", tokens, graph.integers(0)))
    # Index of the output of (expert, token): the number of hits up to it, minus one; gathered for each token's experts.
    so_far = graph.op("CumSum", graph.reshape(hits, -1), graph.constant(0, np.int64))
    lies = graph.op("Sub", so_far, graph.constant(1, np.int64))
    per_token = graph.op("Transpose", graph.op("Reshape", lies, graph.op("Shape", hits)), perm=[1, 0])
    places = graph.op("GatherElements", per_token, chosen, axis=1)
    if experts.weighs_inputs:
        each = graph.reshape(weights, -1, 1)
        mine = graph.op("Mul", mine, graph.op("ScatterElements", each, graph.reshape(places, -1, 1), each, axis=0))
    sizes = graph.op("ReduceSum", hits, graph.integers(1), keepdims=0)
    parts = graph.ops("Split", count, mine, sizes, axis=0)
    outputs = [
        compute(part, gate_up, down) for part, gate_up, down in zip(parts, experts.gate_up, experts.down, strict=True)
    ]
    found = graph.op("Gather", graph.op("Concat", *outputs, axis=0), places)
    if not experts.weighs_inputs:
        found = graph.op("Mul", found, graph.op("Unsqueeze", weights, graph.integers(2)))
    return graph.op("ReduceSum", found, graph.integers(1), keepdims=0)


logger = logging.getLogger(__name__)

_CLAMPED = (-CLAMP, CLAMP, 1.0)
_STEP_ARRAYS = ("token_ids", "positions", "kv_slots", "query_start", "context_len", "block_tables", "logits_rows")


class OnnxOps(NumpyOps):
    """Operations as ONNX operators; activations, weights and KV are float32."""

    name = "onnx"
    dtype = "float32"
    kv_dtypes = ()
    weight_formats = frozenset()
    table_formats = frozenset()
    dequantizes_weights = False
    encodes = False
    chunks = True
    any_experts = True
    latents = True
    biased_experts = True
    ungated_experts = True
    expert_parallel = False
    sinks = True
    recurs = False

    def __init__(self, provider: Provider = CPU) -> None:
        self.provider = provider

    def join(self, group: RankGroup) -> None:
        """Raise, because a session cannot exchange data with other ranks."""
        Ops.join(self, group)

    def cut(self, stage: Stage) -> None:
        """Raise, because a graph begins with tokens."""
        Ops.cut(self, stage)

    def embedding(self, table: Array, token_ids: Array, scale: float = 1.0, *, centred: bool = False) -> Array:
        def emit(graph: Graph, ids: GraphSymbol) -> GraphSymbol:
            x = graph.op("Gather", graph.weight(table), ids)
            x = x if scale == 1.0 else graph.op("Mul", x, graph.constant(scale, np.float32))
            mean = graph.op("ReduceMean", x, graph.constant([1], np.int64), keepdims=1) if centred else None
            return x if mean is None else graph.op("Sub", x, mean)

        return self._call(emit, token_ids)

    def rms_norm(self, x: Array, norm: Norm) -> Array:
        how = {"axis": -1, "epsilon": float(norm.eps)}
        return self._call(lambda graph, x: graph.op("RMSNormalization", x, graph.weight(norm.weight), **how), x)

    def linear(self, x: Array, weight: NumpyLinear) -> Array:
        return self._call(lambda graph, x: _linear(graph, x, weight), x)

    def gate(self, gate_up: Array, activation: Activation) -> Array:
        return self._call(lambda graph, x: _gate(graph, x, activation), gate_up)

    def activate(self, x: Array, activation: PlainActivation) -> Array:
        return self._call(lambda graph, x: _activate(graph, x, activation), x)

    def lora(self, y: Array, x: Array, lora: Lora) -> Array:
        """Find the tokens of every slot in the graph; an adapter without tokens computes on no rows."""

        def emit(graph: Graph, y: GraphSymbol, x: GraphSymbol, places: GraphSymbol) -> GraphSymbol:
            for place, delta in enumerate(lora.deltas, 1):
                if delta is not None:
                    here = graph.op("Equal", places, graph.constant(place, np.int32))
                    rows = graph.op("Transpose", graph.op("NonZero", here), perm=[1, 0])
                    mine = graph.op("GatherND", x, rows)
                    more = _linear(graph, _linear(graph, mine, delta[0]), delta[1])
                    y = graph.op("ScatterND", y, rows, more, reduction="add")
            return y

        return self._call(emit, y, x, lora.step.lora_slots)

    def split_heads(self, qkv: Array, heads: Heads) -> tuple[Array, Array, Array]:
        if heads.latent:
            d, rotated = heads.head_dim, heads.head_dim - heads.latent

            def emit(graph: Graph, x: GraphSymbol) -> tuple[GraphSymbol, ...]:
                q, v, k = (graph.columns(x, *part) for part in ((0, -d), (-d, -rotated), (-rotated, 0)))
                return (q, *(graph.op("Unsqueeze", each, graph.integers(1)) for each in (k, v)))

            q, k, v = self._call(emit, qkv)
            return q, k, v
        sizes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        q, k, v = self._call(
            lambda graph, x: graph.ops(
                "Split", 3, graph.reshape(x, 0, -1, heads.head_dim), graph.integers(*sizes), axis=1
            ),
            qkv,
        )
        return q, k, v

    def joint_norm(self, x: Array, norm: Norm, width: int) -> Array:
        def emit(graph: Graph, x: GraphSymbol) -> GraphSymbol:
            how = {"axis": -1, "epsilon": float(norm.eps)}
            weight = graph.reshape(graph.weight(norm.weight), -1)
            return graph.reshape(graph.op("RMSNormalization", graph.reshape(x, 0, -1), weight, **how), 0, *shape)

        shape = norm.weight.shape
        return self._call(emit, x)

    def rope(self, x: Array, rope: Rope, positions: Array) -> Array:
        """Rotate pairs of elements; each token is a separate sequence."""

        def emit(graph: Graph, x: GraphSymbol, positions: GraphSymbol) -> GraphSymbol:
            where = graph.once(
                ("rope", positions.name),
                lambda: graph.op("Unsqueeze", graph.op("Cast", positions, to=TensorProto.INT64), graph.integers(1)),
            )
            turned = graph.op(
                "RotaryEmbedding",
                graph.op("Unsqueeze", x, graph.integers(2)),
                graph.weight(rope.cos),
                graph.weight(rope.sin),
                where,
                interleaved=int(rope.interleaved),
                rotary_embedding_dim=2 * rope.cos.shape[1],
            )
            return graph.op("Squeeze", turned, graph.integers(2))

        return self._call(emit, x, positions)

    def write_kv(self, layer: Array | TracedLayer, k: Array, v: Array, kv_slots: Array) -> None:
        if isinstance(layer, TracedLayer):
            attention.write(layer, k, v, kv_slots)
        else:
            latent = v.shape[-1] if len(layer) == 1 else 0
            self._on_layer(layer, {"k": k, "v": v, "slots": kv_slots}, {}, emit=attention.write, latent=latent)

    def paged_attention(self, q: Array, layer: Array | TracedLayer, heads: Heads, step: StepInput) -> Array:
        if isinstance(layer, TracedLayer):
            return attention.attend(q, layer, heads, step.group)
        plan = attention.plans(step, {attention.key_of(heads, step.group): heads}, layer.shape[2])
        return self._on_layer(
            layer,
            {"q": q},
            plan,
            emit=lambda layer, q: attention.attend(q, layer, heads, step.group),
            latent=heads.latent,
        )

    def absorb(self, q: Array, weight: Array, heads: Heads) -> Array:
        def emit(graph: Graph, q: GraphSymbol) -> GraphSymbol:
            q = graph.reshape(q, 0, heads.num_heads, -1)
            rotated = graph.columns(q, heads.latent - heads.head_dim, 0)
            own = graph.columns(q, 0, weight.shape[2])
            absorbed = graph.op("Einsum", own, graph.weight(weight), equation="thn,hln->thl")
            return graph.op("Concat", rotated, absorbed, axis=2)

        return self._call(emit, q)

    def expand(self, x: Array, weight: Array, heads: Heads) -> Array:
        def emit(graph: Graph, x: GraphSymbol) -> GraphSymbol:
            x = graph.reshape(x, 0, heads.num_heads, -1)
            expanded = graph.op("Einsum", x, graph.weight(weight), equation="thl,hvl->thv")
            return graph.reshape(expanded, 0, weight.shape[0] * weight.shape[1])

        return self._call(emit, x)

    def moe(self, x: Array, experts: Experts, activation: Activation) -> Array:
        def emit(graph: Graph, x: GraphSymbol) -> GraphSymbol:
            def compute(x: GraphSymbol, gate_up: NumpyLinear, down: NumpyLinear) -> GraphSymbol:
                y = _linear(graph, x, gate_up)
                plain = experts.ungated
                return _linear(
                    graph, _gate(graph, y, activation) if plain is None else _activate(graph, y, plain), down
                )

            y = routed_experts(graph, x, experts, compute=compute)
            if experts.shared_gate_up is None or experts.shared_down is None:
                return y
            shared = compute(x, experts.shared_gate_up, experts.shared_down)
            if experts.shared_gate is not None:
                score = graph.op("MatMul", x, graph.reshape(graph.weight(experts.shared_gate), -1, 1))
                shared = graph.op("Mul", shared, graph.op("Sigmoid", score))
            return graph.op("Add", y, shared)

        return self._call(emit, x)

    def add(self, x: Array, y: Array) -> Array:
        return self._call(lambda graph, x, y: graph.op("Add", x, y), x, y)

    def gather_rows(self, x: Array, rows: Array) -> Array:
        if not isinstance(x, GraphSymbol):
            return super().gather_rows(x, rows)  # also of tokens and logits, after the graph
        return self._call(lambda graph, x, rows: graph.op("Gather", x, rows), x, rows)

    def logits_of(self, x: Array, head: NumpyLinear, softcap: float | None) -> Array:
        def emit(graph: Graph, x: GraphSymbol) -> GraphSymbol:
            logits = _linear(graph, x, head)
            if softcap is None:
                return logits
            cap = graph.constant(softcap, np.float32)
            return graph.op("Mul", graph.op("Tanh", graph.op("Div", logits, cap)), cap)

        return self._call(emit, x)

    def compile(self, forward: Forward) -> Forward:
        return SessionForward(self, forward)

    def compile_states(self, states: Forward) -> Forward:
        """Trace the function as a session; eagerly, each operation would be one."""
        return SessionForward(self, states)

    def compile_adapted(self, forward: Forward, cache: KVCache | None = None, before: Forward | None = None) -> Forward:
        """Trace the forward as a separate session that shares the model's weights."""
        return SessionForward(self, forward, (*_STEP_ARRAYS, "lora_slots"))

    def _call(self, emit: Callable[..., Any], *arrays: Array) -> Any:
        """Emit operators into the graph of the symbols, or run a graph of them on arrays."""
        traced = next((array.graph for array in arrays if isinstance(array, GraphSymbol)), None)
        if traced is not None:
            return emit(traced, *arrays)
        graph = Graph()
        values = {f"x{index}": array for index, array in enumerate(arrays)}
        result = emit(graph, *(graph.input(name, x.dtype, [None] * x.ndim) for name, x in values.items()))
        several = isinstance(result, tuple)
        outputs = {f"y{index}": symbol for index, symbol in enumerate(result if several else (result,))}
        found = Session(graph, outputs, self.provider).bind({}).run(values)
        return found if several else found[0]

    def _on_layer(
        self,
        layer: npt.NDArray[np.float32],
        arrays: dict[str, npt.NDArray[Any]],
        plan: dict[str, npt.NDArray[Any]],
        emit: Callable[..., GraphSymbol | None],
        latent: int,
    ) -> Any:
        graph = Graph()
        _, _, block_size, num_kv_heads, head_dim = layer.shape
        cache = TracedCache(graph, KVShape(1, num_kv_heads, head_dim, block_size=block_size, latent=latent))
        symbols = [graph.input(name, array.dtype, array.shape) for name, array in arrays.items()]
        result = emit(cache.layer(0), *symbols)
        outputs = cache.outputs() | ({} if result is None else {"y": result})
        found = Session(graph, outputs, self.provider).bind(bound([layer])).run(arrays | plan)
        return found[0] if found else None


class SessionForward:
    """Runs a model's forward as one session; KV caches are bound once each."""

    def __init__(self, ops: OnnxOps, forward: Forward, arrays: Sequence[str] = _STEP_ARRAYS) -> None:
        self._ops = ops
        self._arrays = arrays
        self._forward = forward
        self._sessions: dict[KVShape, tuple[Session, dict[PlanKey, Heads]]] = {}
        """With the kinds of layers whose attention inputs a session reads."""
        self._bindings: weakref.WeakKeyDictionary[KVCache, Binding] = weakref.WeakKeyDictionary()
        self._eager = self._several = False

    def __call__(self, step: StepInput, cache: KVCache) -> Array:
        """Return float32 logits [R, V], or what else the forward returns: an array, or a tuple of some."""
        binding = None if self._eager else self._bind(cache)
        if binding is None:
            return self._forward(step, cache)
        values = {name: np.asarray(getattr(step, name)) for name in self._arrays}
        for group, slots in enumerate(() if step.grouped is None else step.grouped.kv_slots):
            values[f"kv_slots_{group}"] = slots
        _, kinds = self._sessions[cache.shape]
        results = binding.run(values | attention.plans(step, kinds, cache.shape.block_size))
        return tuple(results) if self._several else results[0]

    def _bind(self, cache: KVCache) -> Binding | None:
        if cache not in self._bindings:
            try:
                session, _ = traced = self._sessions.get(cache.shape) or self._trace(cache.shape)
            except TraceError as error:
                logger.warning("this model runs operation by operation, which is slower: %s", error)
                self._eager = True
                return None
            self._sessions[cache.shape] = traced
            if not isinstance(cache, NumpyKVCache):
                raise TypeError("the onnx pack needs a cache that it allocated")
            self._bindings[cache] = session.bind(bound([cache.layer(index) for index in range(cache.shape.num_layers)]))
        return self._bindings[cache]

    def _trace(self, shape: KVShape) -> tuple[Session, dict[PlanKey, Heads]]:
        graph = Graph()
        cache: Any = TracedCache(graph, shape)
        result = self._forward(_symbolic_step(graph, self._arrays, shape.groups.count), cache)
        self._several = isinstance(result, tuple)
        results = result if self._several else (result,)
        if not all(isinstance(each, GraphSymbol) for each in results):
            raise TraceError("the forward does not return results of operations")
        outputs = cache.outputs() | {f"y{index}": each for index, each in enumerate(results)}
        return Session(graph, outputs, self._ops.provider), cache.plans


def _symbolic_step(graph: Graph, names: Sequence[str], groups: int) -> StepInput:
    arrays: dict[str, Any] = {
        name: graph.input(name, np.int32, (name, "width") if name == "block_tables" else (name,)) for name in names
    }
    unknown = GraphSymbol(graph, "a host value")
    slots = [graph.input(f"kv_slots_{group}", np.int32, ("kv_slots",)) for group in range(groups)]
    grouped = None if groups == 1 else GroupTables(slots, [unknown] * groups)
    return StepInput(**arrays, max_query=unknown, max_context=unknown, grouped=grouped)  # type: ignore[arg-type]  # raises as arrays do


def _linear(graph: Graph, x: GraphSymbol, weight: NumpyLinear) -> GraphSymbol:
    bias = None if weight.bias is None else graph.weight(weight.bias)
    return graph.op("Gemm", x, graph.weight(weight.weight), bias, transB=1)


def _gate(graph: Graph, gate_up: GraphSymbol, activation: Activation) -> GraphSymbol:
    gate, up = graph.ops("Split", 2, gate_up, axis=-1, num_outputs=2)
    if activation == "clamped_swiglu":
        least, most, one = (
            graph.once(("number", each), partial(graph.constant, each, np.float32)) for each in _CLAMPED
        )
        gated = _activate(graph, graph.op("Min", gate, most), "quick_gelu")
        return graph.op("Mul", gated, graph.op("Add", graph.op("Clip", up, least, most), one))
    return graph.op("Mul", _activate(graph, gate, activation), up)


def _activate(graph: Graph, x: GraphSymbol, activation: PlainActivation) -> GraphSymbol:
    match activation:
        case "silu":
            return graph.op("Mul", x, graph.op("Sigmoid", x))
        case "gelu_tanh":
            return graph.op("Gelu", x, approximate="tanh")
        case "gelu":
            return graph.op("Gelu", x)
        case "quick_gelu":
            return graph.op(
                "Mul", x, graph.op("Sigmoid", graph.op("Mul", x, graph.weight(np.array(1.702, np.float32))))
            )
        case "relu":
            return graph.op("Relu", x)
        case "relu2":
            positive = graph.op("Relu", x)
            return graph.op("Mul", positive, positive)
