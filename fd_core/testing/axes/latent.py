"""Axes of latent attention: sizes of its parts and the step that it computes; each case compared with numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from fd_core.models.families.spec import DecoderSpec
from fd_core.ops.contract import KV_TYPES, Heads, KVShape, Latent, Norm, Ops, Rope, StepInput
from fd_core.ops.numpy.kv_8bit import dequantize_latent, quantize_latent
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.axes.covering import Axis, Case, Value, int_of
from fd_core.testing.axes.layers import NEEDS
from fd_core.testing.axes.parts import Edge, Part
from fd_core.testing.axes.reuse import operation_part
from fd_core.testing.models.arrays import (
    KV_STEP,
    TOLERANCE,
    TURNED,
    Floats,
    Values,
    activations,
    assert_near,
    assert_same,
    but_for_a_step,
    float32_of,
    generator,
    on_device,
    raw,
    step_input,
    turned,
)
from fd_core.types import IntArray

_AXES: Final = (
    Axis("decodes", (2, 0, 1, 5, 33, 193), rare=({"decodes": 1640, "heads": 40},)),
    Axis("drafts", (0, 1, 3)),
    Axis("uniform", (False, True)),
    Axis("chunk", (0, 2, 17, 130)),
    Axis(
        "context",
        (9, 1, 129, 601, 1030, 4097),
        rare=(
            {"context": 32_769, "heads": 16},
            *(
                {"context": 131_073, "latent": 8, "rotated": 2, "block_size": 64, **rows}
                for rows in ({}, {"chunk": 17}, {"decodes": 0, "chunk": 17}, {"drafts": 3})
            ),
        ),
    ),
    Axis("heads", (3, 1, 2, 16, 40, 128), rare=({"heads": 128, "latent": 512, "rotated": 64, "key": 128},)),
    Axis("latent", (24, 8, 17, 64, 512), ("Heads.latent", "KVShape.latent", "Latent.norm")),
    Axis("rotated", (8, 2, 6, 64)),
    Axis("key", (12, 3, 32, 128, 192), ("Latent.absorb",)),
    Axis("value", (10, 1, 32, 128, 256), ("Latent.expand",)),
    Axis("query_rank", (None, 20, 1536), ("Latent.q_norm", "Latent.q_up")),
    Axis("interleaved", (True, False), needs="interleaved_rope"),
    Axis("turned", TURNED),
    Axis("block_size", (8, 1, 5, 64), rare=({"block_size": 4096},)),
    Axis("kv_dtype", ("auto", *KV_TYPES)),
    Axis("moved", (False, True)),
    Axis("composed", (False, True), needs="paged_kv"),
)
"""`key` and `value`: elements of a head; `moved` attends in another cache, to which blocks were copied; `composed`
replaces the pack's fusions by their primitives."""
_HIDDEN: Final = 38


def _rows_of(case: Case) -> list[tuple[int, int]]:
    context, chunk, tokens = int_of(case, "context"), int_of(case, "chunk"), 1 + int_of(case, "drafts")
    contexts = [1 + 37 * index % 64 if index else context for index in range(int_of(case, "decodes"))]
    rows = [(tokens, max(tokens, each)) for each in contexts]
    return [*rows, *([(chunk, chunk + context - 1), (chunk // 2, chunk // 2)] if chunk else [])]


class _LatentOn:
    """A block of latent attention and a cache on one pack, and a step over some rows."""

    def __init__(self, ops: Ops, case: Case) -> None:
        self.ops, self.case, make = ops, case, Values(7)
        heads, size = int_of(case, "heads"), int_of(case, "block_size")
        latent, rotated, key, value = (int_of(case, name) for name in ("latent", "rotated", "key", "value"))
        rank, d, width = case["query_rank"], latent + rotated, heads * (key + rotated)

        def linear(*outs: int, ins: int) -> Any:
            return ops.prepare_linear([raw(make(out, ins, scale=ins**-0.5)) for out in outs])

        def norm(size: int) -> Norm:
            return Norm(ops.prepare_vector(1 + make(size, scale=0.1)), 1e-5)

        rows = _rows_of(case)
        self.longest = max(sum(each) for each in rows)
        table = self.longest + sum(count for count, _ in rows)
        angles = (0.4 + np.arange(table))[:, None] / 10.0 ** np.arange(rotated // 2)
        cos, sin = (ops.prepare_vector(of(angles).astype(np.float32)) for of in (np.cos, np.sin))
        rope = Rope(cos, sin, bool(case["interleaved"]))
        self.heads = Heads(heads, 1, d, 0.9 * (key + rotated) ** -0.5, rope, latent=latent)
        self.norm = norm(_HIDDEN)
        self.qkv = linear(width if rank is None else int_of(case, "query_rank"), d, ins=_HIDDEN)
        self.latent = Latent(
            norm(latent),
            None if rank is None else norm(int_of(case, "query_rank")),
            None if rank is None else linear(width, ins=int_of(case, "query_rank")),
            absorb=ops.prepare_heads(make(heads, latent, key, scale=key**-0.5)),
            expand=ops.prepare_heads(make(heads, value, latent, scale=latent**-0.5)),
        )
        used = -(-np.array([context for _, context in rows]) // size)
        self.count = int(used.sum()) + 1
        tables = np.zeros((len(rows), used.max()), np.int32)
        tables[np.arange(used.max()) < used[:, None]] = generator(7).permutation(self.count)[: used.sum()]
        self._rows, self._tables = rows, tables
        self.slots = step_input(rows, size, tables).kv_slots
        self.step = self._step(tables)
        shape = KVShape(2, 1, d, block_size=size, dtype=str(case["kv_dtype"]), latent=latent)
        self.cache = ops.allocate_kv(shape, self.count)
        history: Any = make(self.count, 2, 1, size, 1, d)
        free = np.ones(self.count, np.bool_)
        for (tokens, context), table in zip(rows, tables, strict=True):
            free[table[: -(-(context - tokens) // size)]] = False
        history[free] = np.nan  # as a failed request leaves blocks, until a token is written
        if shape.dtype != "auto":
            history = quantize_latent(history[..., :rotated], history[..., rotated:], shape.dtype)
        elif ops.dtype == "bfloat16":
            history = (history.view(np.uint32) >> 16).astype(np.uint16)
        else:
            history = history.astype(ops.dtype)
        self.import_cache(history)
        self.x = make(sum(count for count, _ in rows), _HIDDEN)

    def _step(self, tables: IntArray) -> StepInput:
        step = step_input(self._rows, int_of(self.case, "block_size"), tables)
        step = on_device(self.ops, turned(step, self.case["turned"], self.longest))
        return replace(step, uniform=bool(self.case["uniform"]))

    def exported(self) -> Any:
        return self.cache.export_blocks(np.arange(self.count, dtype=np.int32))

    def import_cache(self, blocks: Any) -> None:
        self.cache.import_blocks(np.arange(self.count, dtype=np.int32), blocks)

    def move(self) -> None:
        """Continue with the blocks in other places of another cache."""
        held, places = self.exported(), np.roll(np.arange(self.count, dtype=np.int32), 1)
        self.import_cache(np.zeros_like(held))
        self.cache = self.ops.allocate_kv(self.cache.shape, self.count)
        self.cache.import_blocks(places, held)
        self.step = self._step(places[self._tables])

    def values(self, blocks: Any) -> Floats:
        """Return the vectors of exported blocks in float32."""
        if self.cache.shape.dtype != "auto":
            return dequantize_latent(blocks, self.heads.latent)
        return float32_of(blocks)

    def written(self) -> Floats:
        """Return the vectors of the step's tokens."""
        vectors = self.values(np.ascontiguousarray(self.exported()[:, 1, 0]))
        return vectors.reshape(-1, self.heads.head_dim)[self.slots]

    def queries(self) -> Floats:
        ops = self.ops
        given = self.norm, self.qkv, self.latent, self.heads, self.cache.layer(1), self.step
        x = activations(ops, self.x)
        q = Ops.latent_inputs(ops, x, *given) if self.case["composed"] else ops.latent_inputs(x, *given)
        return np.array(ops.to_host(q), np.float32).reshape(len(self.x), self.heads.num_heads, self.heads.head_dim)

    def output(self, queries: Floats) -> Floats:
        ops, given = self.ops, (self.latent, self.heads, self.cache.layer(1), self.step)
        q = activations(ops, queries.reshape(len(queries), -1)).reshape(queries.shape)
        a = Ops.latent_attention(ops, q, *given) if self.case["composed"] else ops.latent_attention(q, *given)
        return np.array(ops.to_host(a), np.float32)


def check_latent(ops: Ops, case: Case) -> None:
    """Compare queries, the cache and the outputs of heads with numpy. Raises `AssertionError`."""
    ours, oracle = _LatentOn(ops, case), _LatentOn(NumpyOps(), case)
    before, tolerance = ours.exported(), TOLERANCE[ops.dtype]
    found, expected = ours.queries(), oracle.queries()
    assert_near(ops, ops.from_host(found), expected, 2 * tolerance)
    after = ours.exported()
    assert_same(after[:, 0], before[:, 0], "another layer")
    kv_dtype, right = ours.cache.shape.dtype, oracle.written()
    written = but_for_a_step(ours.written(), right, kv_dtype)
    assert_near(ops, ops.from_host(written), right, max(2 * tolerance, KV_STEP[kv_dtype]))
    if case["moved"]:
        ours.move()
    oracle.import_cache(ours.values(after) if ours.cache.shape.dtype == "auto" else after)
    assert_near(ops, ops.from_host(ours.output(found)), oracle.output(found), max(tolerance, 1e-4))


def _allowed(case: Case) -> bool:
    rows, d = _rows_of(case), int_of(case, "latent") + int_of(case, "rotated")
    if case["uniform"] and case["chunk"]:
        return False
    scores = sum(count * context for count, context in rows) * int_of(case, "heads")
    blocks = sum(-(-context // int_of(case, "block_size")) for _, context in rows) * int_of(case, "block_size")
    tokens = sum(count for count, _ in rows)
    weights = int_of(case, "heads") * int_of(case, "latent") * (int_of(case, "key") + int_of(case, "value"))
    if case["query_rank"] is not None:
        weights += int_of(case, "heads") * int_of(case, "query_rank") * (int_of(case, "key") + int_of(case, "rotated"))
    return bool(rows) and scores * d < 2e7 and blocks * d < 3e5 and tokens * weights < 2e8


def _sizes(case: Case) -> dict[str, int]:
    rows = _rows_of(case)
    return {
        "max_num_seqs": len(rows),
        "max_model_len": max(context for _, context in rows),
        "block_size": int_of(case, "block_size"),
        "head_dim": int_of(case, "latent") + int_of(case, "rotated"),
        "group": int_of(case, "heads"),
    }


def _of_model(model: DecoderSpec) -> list[Case]:
    """Return some steps over each size of latent attention in a model."""
    sizes: dict[tuple[tuple[str, Value], ...], None] = {}
    for attention in model.attention:
        if (latent := attention.latent) is not None:
            case: dict[str, Value] = {
                "heads": attention.num_heads,
                "latent": latent.rank,
                "rotated": attention.head_dim - latent.rank,
                "key": latent.key,
                "value": latent.value,
                "query_rank": None if latent.q_up is None else latent.q_up.ins,
                "interleaved": attention.rope.interleaved,
            }
            sizes[tuple(case.items())] = None
    steps = {"decodes": 1, "context": 129}, {"decodes": 2, "chunk": 17}
    return [{**dict(each), **step} for each in sizes for step in steps]


_EDGES: Final = {
    "max_num_seqs": Edge("decodes"),
    "max_model_len": Edge("context"),
    "block_size": Edge("block_size"),
    "group": Edge("heads"),
}
LATENT: Final[Part[Ops]] = operation_part(
    "latent", _AXES, check_latent, _allowed, _EDGES, sizes=_sizes, of_model=_of_model, needs=(*NEEDS, "latents")
)
