"""Checks of the contract's operations: the same inputs for a pack and for the oracle, and the bytes moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from fd_core.config.layer_groups import LayerGroups
from fd_core.ops.contract import (
    KV_TYPES,
    Activation,
    Array,
    KVShape,
    Lora,
    Norm,
    Ops,
    PlainActivation,
    Recurrent,
    RecurrentRule,
    Rope,
)
from fd_core.ops.weights import ITEM_BYTES, LowRank
from fd_core.runner.inputs.inputs import adapter_rows
from fd_core.testing.axes import pools, products, routing, sampling
from fd_core.testing.axes.latent import LATENT
from fd_core.testing.axes.layers import LAYERS
from fd_core.testing.axes.parts import Part
from fd_core.testing.axes.recurrent import RECURRENT
from fd_core.testing.models.arrays import (
    Values,
    activations,
    float32_of,
    on_device,
    penalty_input,
    raw,
    sample_input,
    step_input,
)
from fd_core.testing.models.layers import Geometry, LayerOn


class Size(NamedTuple):
    """Problem size of one check."""

    name: str
    tokens: int
    geometry: Geometry
    context: int
    vocabulary: int

    def rows(self) -> list[tuple[int, int]]:
        """Return (tokens, context) of a step: decodes, and a chunk of a prompt."""
        chunk = self.tokens // 2
        return [*((1, self.context - index) for index in range(self.tokens - chunk)), (chunk, chunk + 3)]


SIZES: Final = (
    Size("small", 5, Geometry(hidden=64, inner=96, experts=5), context=20, vocabulary=1003),
    Size(
        "large",
        64,
        Geometry(heads=16, kv_heads=4, d=64, hidden=1024, inner=1408, experts=4, block_size=32),
        context=1024,
        vocabulary=70_001,
    ),
)
"""The last one is timed; cases of the kit cover the sizes between, see `PART_CHECKS`."""


class Prepared(NamedTuple):
    """One check on one pack, its inputs on the device."""

    call: Callable[[], Any]
    """Runs the operation; repeated calls write into the same arrays."""
    moved: int
    """Minimum bytes that an implementation reads and writes."""
    results: Callable[[Any], Sequence[Array]] = lambda found: [found]
    """Arrays to compare, from the result of the first call."""


class OpCheck(NamedTuple):
    """An operation, or a part of it."""

    primitive: str
    """The method of `Ops`, or of its KV cache."""
    prepare: Callable[[Ops, Size], Prepared]
    case: str = ""
    exact: bool = False
    """True if all packs must return the same bits; otherwise the kit's tolerance for the dtype applies."""
    asks: tuple[str, ...] = ()
    """Required abilities, which a backend may lack."""
    kv_dtype: str = "auto"
    """KV dtype of the check, which a pack may not support."""


class PartCheck(NamedTuple):
    """An operation in the cases of a part of the kit."""

    primitive: str
    part: Part[Ops]
    asks: tuple[str, ...] = ("primitives",)
    """Required abilities, which a backend may lack."""


PART_CHECKS: Final = (
    PartCheck("from_host, to_host", products.TRANSFER, ()),
    PartCheck("embedding", products.EMBEDDING),
    PartCheck("rms_norm", products.NORM),
    PartCheck("activate", products.ACTIVATE, ("primitives", "ungated")),
    PartCheck("linear", products.LINEAR),
    PartCheck("lora", routing.LORA),
    PartCheck("logits_of", products.HEAD),
    PartCheck("rope", pools.ROPE),
    PartCheck("write_kv", pools.KV, ("primitives", "kv_transfer")),
    PartCheck("moe", routing.MOE, ("primitives", "moe")),
    PartCheck("sample", sampling.SAMPLE, ()),
    PartCheck("penalize", sampling.PENALIZE, ()),
    PartCheck("mask_logits", sampling.MASK, ()),
    PartCheck("logprobs", sampling.SCORES, ()),
    PartCheck("verify", sampling.VERIFY, ()),
    PartCheck("add_at", sampling.CELLS),
    PartCheck("attention", LAYERS, ("primitives", "kv_transfer")),
    PartCheck("latent_attention", LATENT, ("primitives", "latents")),
    PartCheck("recurrence", RECURRENT, ("primitives", "recurs")),
)
"""Parts of the kit by operation; `CELLS` also gathers and writes rows, and `LAYERS` calls all fusions."""


def _width(ops: Ops) -> int:
    return ITEM_BYTES[ops.dtype]


def _bytes(*arrays: npt.NDArray[Any]) -> int:
    return sum(array.nbytes for array in arrays)


def _round_trip(ops: Ops, size: Size) -> Prepared:
    arrays: list[npt.NDArray[Any]] = [
        np.arange(size.vocabulary, dtype=np.int32),
        Values()(size.tokens, size.vocabulary),
        np.arange(size.vocabulary, dtype=np.int64),
    ]
    return Prepared(
        lambda: ops.fetch([ops.from_host(array) for array in arrays]),
        4 * _bytes(*arrays),
        lambda found: [ops.from_host(np.array(array)) for array in found],
    )


def _embedding(ops: Ops, size: Size) -> Prepared:
    table = Values()(size.vocabulary, size.geometry.hidden)
    ids = ops.from_host(np.random.default_rng(0).integers(0, size.vocabulary, size.tokens).astype(np.int32))
    prepared = ops.prepare_embedding(raw(table))
    moved = 2 * size.tokens * size.geometry.hidden * _width(ops)
    return Prepared(lambda: ops.embedding(prepared, ids, 2.0), moved)


def _rms_norm(ops: Ops, size: Size) -> Prepared:
    make, hidden = Values(), size.geometry.hidden
    x, norm = activations(ops, make(size.tokens, hidden)), Norm(ops.prepare_vector(make(hidden)), 1e-5)
    return Prepared(lambda: ops.rms_norm(x, norm), 2 * size.tokens * hidden * _width(ops))


def _linear(ops: Ops, size: Size, method: str = "linear", biased: bool = False) -> Prepared:
    make, hidden, inner = Values(), size.geometry.hidden, size.geometry.inner
    x = activations(ops, make(size.tokens, hidden))
    parts = [raw(make(inner, hidden, scale=hidden**-0.5)) for _ in range(2)]
    biases = [raw(make(inner)) for _ in range(2)] if biased else None
    weight = ops.tied_head(ops.prepare_embedding(parts[0]), parts[0]) if method == "tied" else None
    weight = ops.prepare_linear(parts, biases) if weight is None else weight
    outer = inner if method == "tied" else 2 * inner
    moved = (hidden * outer + size.tokens * (hidden + outer)) * _width(ops)
    if method == "logits_of":
        return Prepared(lambda: ops.logits_of(x, weight, None), moved)
    return Prepared(lambda: ops.linear(x, weight), moved)


def _gated(ops: Ops, size: Size, activation: Activation, apart: bool = False) -> Prepared:
    """A gated linear, its output before the activation, and the activation."""
    make, hidden, inner = Values(), size.geometry.hidden, size.geometry.inner
    x = activations(ops, make(size.tokens, hidden))
    weight = ops.prepare_linear([raw(make(inner, hidden, scale=hidden**-0.5)) for _ in range(2)], gated=True)
    moved = (2 * hidden * inner + size.tokens * (hidden + (5 if apart else 1) * inner)) * _width(ops)
    if apart:
        return Prepared(lambda: ops.gate(ops.gate_up(x, weight), activation), moved)
    return Prepared(lambda: ops.gated_linear(x, weight, activation), moved)


def _lora(ops: Ops, size: Size) -> Prepared:
    make, hidden, adapters, rank = Values(), size.geometry.hidden, 2, 8
    y, x = (activations(ops, make(size.tokens, hidden)) for _ in range(2))
    parts = [
        LowRank(make(rank, hidden, scale=hidden**-0.5), make(hidden, rank, scale=rank**-0.5)) for _ in range(adapters)
    ]
    places = np.arange(size.tokens, dtype=np.int32) % (adapters + 1)
    step = step_input([(size.tokens, size.tokens)], size.tokens, np.zeros((1, 1), np.int32))
    lora = Lora([ops.prepare_lora([part], [hidden]) for part in parts], replace(step, **adapter_rows(places, ops)))
    moved = 2 * (hidden * adapters * rank + size.tokens * (2 * hidden + rank)) * _width(ops)
    return Prepared(lambda: ops.lora(y, x, lora), moved)


def _add(ops: Ops, size: Size) -> Prepared:
    make, hidden = Values(), size.geometry.hidden
    x, y = activations(ops, make(size.tokens, hidden)), activations(ops, make(size.tokens, hidden))
    return Prepared(lambda: ops.add(x, y), 3 * size.tokens * hidden * _width(ops))


def _gather_rows(ops: Ops, size: Size) -> Prepared:
    values = Values()(size.tokens, size.vocabulary)
    x = ops.from_host(values)
    rows = ops.from_host(np.arange(size.tokens, dtype=np.int32)[::-1].copy())
    return Prepared(lambda: ops.gather_rows(x, rows), 2 * values.nbytes)


def _layer(ops: Ops, size: Size, experts: int = 0, kv_dtype: str = "auto") -> LayerOn:
    return LayerOn(ops, replace(size.geometry, experts=experts, kv_dtype=kv_dtype), size.rows())


def _kept(ops: Ops, layer: LayerOn) -> int:
    """Bytes of one token's keys, or values, in the cache."""
    shape = layer.cache.shape
    return shape.num_kv_heads * shape.stored_head * (1 if shape.dtype in KV_TYPES else _width(ops))


def _queries_keys_values(ops: Ops, layer: LayerOn) -> Array:
    g = layer.g
    return activations(ops, Values(1)(layer.tokens, (g.heads + 2 * g.kv_heads) * g.d))


def _heads(ops: Ops, layer: LayerOn) -> tuple[Array, Array, Array]:
    return ops.split_heads(_queries_keys_values(ops, layer), layer.heads)


def _split_heads(ops: Ops, size: Size) -> Prepared:
    layer = _layer(ops, size)
    x = _queries_keys_values(ops, layer)
    return Prepared(lambda: ops.split_heads(x, layer.heads), 0, lambda found: found)


def _rope(ops: Ops, size: Size, interleaved: bool) -> Prepared:
    layer = _layer(ops, size)
    q, _, _ = _heads(ops, layer)
    rope = Rope(layer.heads.rope.cos, layer.heads.rope.sin, interleaved)
    moved = 2 * layer.tokens * layer.g.heads * layer.g.d * _width(ops)
    return Prepared(lambda: ops.rope(q, rope, layer.step.positions), moved)


def _write_kv(ops: Ops, size: Size, kv_dtype: str = "auto") -> Prepared:
    layer = _layer(ops, size, kv_dtype=kv_dtype)
    _, k, v = _heads(ops, layer)
    g = layer.g
    moved = 2 * layer.tokens * (g.kv_heads * g.d * _width(ops) + _kept(ops, layer))

    def written(_: Any) -> list[Array]:
        # Entries after the context in its last block are undefined; a pack may clear them.
        held = np.asarray(ops.to_host(_exported(ops, layer))).reshape(-1, 2, 2, g.block_size, g.kv_heads * g.d)
        by_place = held[:, 1].swapaxes(1, 2).reshape(-1, 2 * g.kv_heads * g.d)
        return [ops.from_host(by_place[np.asarray(ops.to_host(layer.step.kv_slots))])]

    return Prepared(lambda: ops.write_kv(layer.kv, k, v, layer.step.kv_slots), moved, written)


def _blocks(layer: LayerOn) -> npt.NDArray[Any]:
    return np.arange(layer.cache.num_blocks, dtype=np.int32)


def _exported(ops: Ops, layer: LayerOn) -> Array:
    """Return the content of the cache as float32 on the device."""
    held = layer.cache.export_blocks(_blocks(layer))
    floats = float32_of(held)
    return ops.from_host(floats.reshape(len(floats), -1).copy())


def _transfer(ops: Ops, size: Size, method: str) -> Prepared:
    layer = _layer(ops, size)
    blocks, held = _blocks(layer), layer.cache.export_blocks(_blocks(layer))
    if method == "export_blocks":
        return Prepared(lambda: layer.cache.export_blocks(blocks), 2 * held.nbytes, lambda _: [_exported(ops, layer)])
    turned = blocks[::-1].copy()
    return Prepared(lambda: layer.cache.import_blocks(turned, held), 2 * held.nbytes, lambda _: [_exported(ops, layer)])


def _attention(ops: Ops, size: Size, method: str = "paged_attention", kv_dtype: str = "auto") -> Prepared:
    layer = _layer(ops, size, kv_dtype=kv_dtype)
    q, k, v = _heads(ops, layer)
    ops.write_kv(layer.kv, k, v, layer.step.kv_slots)
    g = layer.g
    read = 2 * sum(context for _, context in layer.rows) * _kept(ops, layer)
    moved = read + 2 * layer.tokens * g.heads * g.d * _width(ops)
    if method == "attention":
        return Prepared(lambda: ops.attention(q, layer.heads, layer.kv, layer.step), moved)
    return Prepared(lambda: ops.paged_attention(q, layer.kv, layer.heads, layer.step), moved)


def _moe(ops: Ops, size: Size, method: str = "moe") -> Prepared:
    layer = _layer(ops, size, size.geometry.experts)
    g, experts = layer.g, layer.experts
    assert experts is not None
    x = activations(ops, layer.x)
    moved = (3 * g.hidden * g.inner * min(g.experts, 2 * layer.tokens) + 2 * layer.tokens * g.hidden) * _width(ops)
    if method == "moe":
        return Prepared(lambda: ops.moe(x, experts, "silu"), moved)
    return Prepared(lambda: ops.settle(ops.moe_residual(x, layer.norm, experts, "silu")), moved)


def _recurrence(ops: Ops, size: Size, rule: RecurrentRule, method: str = "recur") -> Prepared:
    """Prepare two steps of two rows: prompts, then chunks that continue from their states."""
    g, values = size.geometry, Values(4)
    gates = rule == "gate"
    channels = g.hidden if gates else (2 * g.kv_heads + g.heads) * g.d

    def vector(*shape: int) -> Array:
        return ops.prepare_vector(values(*shape))

    sizes: dict[str, Any] = (
        {} if gates else {"key_heads": g.kv_heads, "value_heads": g.heads, "key_dim": g.d, "value_dim": g.d}
    )
    more = {} if gates else {"decay": vector(g.heads), "time_bias": vector(g.heads), "norm": Norm(vector(g.d), 1e-5)}
    if rule == "scan":
        more |= {"norm": Norm(vector(g.heads * g.d), 1e-5), "skip": vector(g.heads), "time_limits": (0.5, 2.0)}
    recurrent = Recurrent(rule, vector(4, channels), **sizes, **more)
    (state, journal), width = recurrent.sizes, recurrent.inputs
    shape = KVShape(1, g.kv_heads, g.d, 1, groups=LayerGroups(1, 1, 2), state=state, journal=journal)
    tokens = -(-shape.least_block_size(_width(ops), 8) // 32) * 32
    layer = ops.allocate_kv(replace(shape, block_size=tokens), 2).layer(0)
    tables = np.array([[1], [0]], np.int32)
    steps = [on_device(ops, step_input(rows, tokens, tables)) for rows in ([(5, 5), (3, 3)], [(1, 6), (4, 7)])]
    count = len(steps[0].positions), len(steps[1].positions)
    moved = (2 * state * 4 + sum(count) * width * _width(ops)) * 2
    if method == "recur":
        given = [*zip([values(each, width) for each in count], steps, strict=True)]
        return Prepared(
            lambda: [ops.recur(activations(ops, x), recurrent, layer, step) for x, step in given], moved, list
        )
    pairs = [(activations(ops, values(each, g.hidden)), step) for each, step in zip(count, steps, strict=True)]
    inputs = ops.prepare_linear([raw(values(width, g.hidden) * g.hidden**-0.5)])
    rest = Norm(vector(g.hidden), 1e-5), inputs, recurrent, layer
    return Prepared(lambda: [ops.recurrence(x, *rest, step) for x, step in pairs], moved, list)


def _gate_heads(ops: Ops, size: Size, method: str = "gate_heads") -> Prepared:
    g, values = size.geometry, Values(5)
    a, gate = (values(size.tokens, g.heads * g.d) for _ in range(2))
    moved = 3 * size.tokens * g.heads * g.d * _width(ops)
    if method == "gate_heads":
        return Prepared(lambda: ops.gate_heads(activations(ops, a), activations(ops, gate)), moved)
    x, norm = activations(ops, values(size.tokens, g.hidden)), Norm(ops.prepare_vector(values(g.hidden)), 1e-5)
    weight = ops.prepare_linear([raw(values(g.heads * g.d, g.hidden) * g.hidden**-0.5)])
    return Prepared(lambda: ops.gated_attention(activations(ops, a), x, norm, weight), moved)


def _settle(ops: Ops, size: Size) -> Prepared:
    """Check that a norm reads a deferred sum without changing it or adding it twice."""
    layer = _layer(ops, size)
    g, tokens = layer.g, layer.tokens
    x, a = activations(ops, layer.x), activations(ops, Values(2)(tokens, g.heads * g.d))

    def call() -> list[Array]:
        stream = ops.project_residual(a, layer.output, x)
        return [ops.rms_norm(stream, layer.norm), ops.settle(stream)]

    moved = (g.hidden * g.heads * g.d + tokens * (3 * g.hidden + g.heads * g.d)) * _width(ops)
    return Prepared(call, moved, lambda found: found)


def _activate(ops: Ops, size: Size, activation: PlainActivation) -> Prepared:
    x = Values(1)(size.tokens, size.geometry.inner)
    return Prepared(partial(ops.activate, activations(ops, x), activation), 2 * x.size * _width(ops))


def _fusion(ops: Ops, size: Size, method: str) -> Prepared:
    layer = _layer(ops, size)
    g, tokens = layer.g, layer.tokens
    x, heads = activations(ops, layer.x), (g.heads + 2 * g.kv_heads) * g.d

    def prepared(call: Callable[[], Any], weights: int, wide: int) -> Prepared:
        return Prepared(call, (weights + tokens * wide) * _width(ops))

    match method:
        case "attention_inputs":
            inputs = partial(ops.attention_inputs, x, layer.norm, layer.qkv, layer.heads, layer.kv, layer.step)
            return prepared(inputs, g.hidden * heads, g.hidden + heads)
        case "project_residual":
            inner = g.heads * g.d
            a = activations(ops, Values(2)(tokens, inner))
            project = partial(ops.project_residual, a, layer.output, x)
            return prepared(lambda: ops.settle(project()), g.hidden * inner, 2 * g.hidden + inner)
        case "mlp_inputs":
            gated = partial(ops.mlp_inputs, x, layer.norm, layer.gate_up, "silu")
            return prepared(gated, 2 * g.hidden * g.inner, g.hidden + g.inner)
        case "plain_mlp_inputs":
            plain = partial(ops.plain_mlp_inputs, x, layer.norm, layer.qkv, "relu2")
            return prepared(plain, g.hidden * heads, g.hidden + heads)
    rows = ops.from_host(np.arange(tokens, dtype=np.int32)[::-1].copy())
    head = ops.prepare_linear([raw(Values(3)(g.inner, g.hidden, scale=g.hidden**-0.5))])
    return prepared(lambda: ops.logits(x, layer.norm, head, rows), g.hidden * g.inner, g.hidden + g.inner)


def _logits(size: Size) -> npt.NDArray[np.float32]:
    """Return logits of several scales; every third row is rounded to produce ties."""
    rng = np.random.default_rng(5)
    rows = min(size.tokens, 16)
    logits = (rng.standard_normal((rows, size.vocabulary)) * rng.choice([0.2, 1.0, 4.0], (rows, 1))).astype(np.float32)
    logits[::3] = np.round(logits[::3] * 2) / 2
    return logits


def _sample(ops: Ops, size: Size, **columns: Any) -> Prepared:
    logits = _logits(size)
    rows = len(logits)
    every = {name: np.resize(values, rows) for name, values in columns.items()}
    chosen = {"seeds": np.arange(rows) + 2**40, "positions": 1000 * np.arange(rows), **every}
    device, parameters = ops.from_host(logits), on_device(ops, sample_input(rows, **chosen))
    return Prepared(lambda: ops.sample(device, parameters), logits.nbytes, lambda found: found)


def _scored(ops: Ops, size: Size, method: str) -> Prepared:
    logits = _logits(size)
    device, tokens = ops.from_host(logits), ops.from_host(np.arange(len(logits), dtype=np.int32))
    if method == "ranks":
        return Prepared(lambda: ops.ranks(device, tokens), logits.nbytes)
    return Prepared(lambda: ops.logprobs(device, tokens, 20), logits.nbytes, lambda found: found)


def _add_at(ops: Ops, size: Size, dtype: type[np.generic]) -> Prepared:
    logits = _logits(size).round().astype(dtype)
    x, rng = ops.from_host(logits), np.random.default_rng(6)
    rows = rng.integers(0, len(logits), 200).astype(np.int32)
    ids = rng.integers(0, size.vocabulary, 200).astype(np.int32)
    places = [ops.from_host(array) for array in (rows, ids, rng.integers(-3, 4, 200).astype(dtype))]
    return Prepared(lambda: ops.add_at(x, *places), 200 * 12)


def _write_rows(ops: Ops, size: Size) -> Prepared:
    x = ops.from_host(np.zeros((16, size.vocabulary), np.int32))
    values = np.random.default_rng(7).integers(0, 9, (3, size.vocabulary), dtype=np.int32)
    rows, device = ops.from_host(np.array([15, 0, 7], np.int32)), ops.from_host(values)
    return Prepared(lambda: ops.write_rows(x, rows, device), 2 * values.nbytes)


def _penalize(ops: Ops, size: Size) -> Prepared:
    logits, rng = _logits(size), np.random.default_rng(8)
    counts = rng.integers(-8, 9, logits.shape, dtype=np.int32).clip(0)
    columns: dict[str, Any] = {
        "repetition": rng.choice([0.9, 1.0, 1.2], len(logits)),
        "presence": 0.7,
        "frequency": -0.3,
    }
    penalties = on_device(ops, penalty_input(counts, drafts=[(0, 1), (1, 1), (1, 2)], **columns))
    device = ops.from_host(logits)
    return Prepared(lambda: ops.penalize(device, penalties), 3 * logits.nbytes)


def _mask_logits(ops: Ops, size: Size) -> Prepared:
    logits, rng = _logits(size), np.random.default_rng(10)
    rows = rng.permutation(len(logits)).astype(np.int32)
    bits = rng.integers(-(2**31), 2**31, (len(rows), -(-size.vocabulary // 32)), dtype=np.int32)
    arrays = [ops.from_host(array) for array in (logits, rows, bits)]
    return Prepared(lambda: ops.mask_logits(*arrays), _bytes(bits) + logits.nbytes // 2)


def _verify(ops: Ops, size: Size) -> Prepared:
    rng = np.random.default_rng(9)
    arrays = [rng.integers(0, 2, (size.tokens, width)).astype(np.int32) for width in (5, 4)]
    counts = rng.integers(0, 5, size.tokens).astype(np.int32)
    places = [ops.from_host(array) for array in (*arrays, counts)]
    return Prepared(lambda: ops.verify(*places), _bytes(*arrays, counts))


def _allocate_kv(ops: Ops, size: Size) -> Prepared:
    g = size.geometry
    shape = KVShape(2, g.kv_heads, g.d, block_size=g.block_size)
    return Prepared(lambda: ops.allocate_kv(shape, size.context // g.block_size), 0, lambda _: [])


def _checks() -> Iterator[OpCheck]:
    yield OpCheck("from_host, to_host", _round_trip, exact=True)
    yield OpCheck("embedding", _embedding)
    yield OpCheck("rms_norm", _rms_norm)
    yield OpCheck("linear", _linear)
    yield OpCheck("linear", partial(_linear, biased=True), "bias", asks=("biases",))
    yield OpCheck("tied_head", partial(_linear, method="tied"))
    for activation in ("silu", "gelu_tanh", "gelu"):
        yield OpCheck("gated_linear", partial(_gated, activation=activation), activation)
    for plain in get_args(PlainActivation):
        yield OpCheck("activate", partial(_activate, activation=plain), plain, asks=("ungated",))
    yield OpCheck("gate_up, gate", partial(_gated, activation="silu", apart=True))
    yield OpCheck("lora", _lora)
    yield OpCheck("logits_of", partial(_linear, method="logits_of"))
    yield OpCheck("add", _add)
    yield OpCheck("gather_rows", _gather_rows, exact=True)
    yield OpCheck("allocate_kv", _allocate_kv)
    yield OpCheck("split_heads", _split_heads)
    yield OpCheck("rope", partial(_rope, interleaved=False))
    yield OpCheck("rope", partial(_rope, interleaved=True), "interleaved", asks=("interleaved_rope",))
    yield OpCheck("write_kv", _write_kv)
    yield OpCheck("paged_attention", _attention, asks=("paged_kv",))
    for kv in KV_TYPES:
        yield OpCheck("write_kv", partial(_write_kv, kv_dtype=kv), kv, kv_dtype=kv)
        yield OpCheck("paged_attention", partial(_attention, kv_dtype=kv), kv, asks=("paged_kv",), kv_dtype=kv)
    for method in ("export_blocks", "import_blocks"):
        yield OpCheck(method, partial(_transfer, method=method), exact=True, asks=("kv_transfer",))
    yield OpCheck("moe", _moe, asks=("moe",))
    greedy: dict[str, Any] = {"temperature": 0.0}
    drawn: dict[str, Any] = {"temperature": [0.0, 0.3, 1.0, 2.5]}
    filters: dict[str, Any] = {
        **drawn,
        "top_k": [0, 40, 1, 400],
        "top_p": [0.9, 1.0, 0.1, 0.999],
        "min_p": [0.0, 0.01, 0.0, 0.2, 0.0],
    }
    for case, columns in (("greedy", greedy), ("drawn", drawn), ("filters", filters)):
        yield OpCheck("sample", partial(_sample, **columns), case, exact=True)
    yield OpCheck("add_at", partial(_add_at, dtype=np.float32), "float32", exact=True)
    yield OpCheck("add_at", partial(_add_at, dtype=np.int32), "int32", exact=True)
    yield OpCheck("write_rows", _write_rows, exact=True)
    yield OpCheck("penalize", _penalize, exact=True)
    yield OpCheck("mask_logits", _mask_logits, exact=True)
    yield OpCheck("logprobs", partial(_scored, method="logprobs"))
    yield OpCheck("ranks", partial(_scored, method="ranks"), exact=True)
    yield OpCheck("verify", _verify, exact=True)
    for method in ("attention_inputs", "project_residual", "mlp_inputs", "logits"):
        yield OpCheck(method, partial(_fusion, method=method))
    yield OpCheck("plain_mlp_inputs", partial(_fusion, method="plain_mlp_inputs"), asks=("ungated",))
    yield OpCheck("settle", _settle)
    yield OpCheck("attention", partial(_attention, method="attention"))
    yield OpCheck("moe_residual", partial(_moe, method="moe_residual"), asks=("moe",))
    rules: tuple[RecurrentRule, ...] = get_args(RecurrentRule)
    for rule in rules:
        yield OpCheck("recur", partial(_recurrence, rule=rule), rule, asks=("recurs",))
        yield OpCheck("recurrence", partial(_recurrence, rule=rule, method="recurrence"), rule, asks=("recurs",))
    yield OpCheck("gate_heads", _gate_heads, asks=("recurs",))
    yield OpCheck("gated_attention", partial(_gate_heads, method="gated_attention"), asks=("recurs",))


CHECKS: Final = tuple(_checks())
