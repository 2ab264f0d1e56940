"""Axes of the cache: rotary embedding, and keys and values written, copied and read at any place of a pool."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import KV_TYPES, Heads, KVCache, KVShape, Ops, Rope
from fd_core.ops.numpy.kv_8bit import quantize_kv
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.weights import ITEM_BYTES, RawTensor
from fd_core.testing.axes.covering import Axis, Case, around, int_of
from fd_core.testing.axes.layers import NEEDS
from fd_core.testing.axes.parts import Edge, Part
from fd_core.testing.axes.reuse import operation_part
from fd_core.testing.models.arrays import (
    Floats,
    Inputs,
    Values,
    assert_near,
    assert_same,
    assert_within,
    float32_of,
    generator,
    heads_on,
    no_rope,
    on_device,
    out_of_order,
    step_input,
)
from fd_core.types import IntArray

ORACLE: Final = NumpyOps()


# Rotary embedding ----------------------------------------------------------------------------------------------------

_ROPE: Final = (
    Axis("tokens", (3, 1, 2, 17, 33, 65, 129, 257, 1025), rare=({"tokens": 4097, "heads": 32},)),
    Axis("heads", (2, 1, 3, 7, 8, 32)),
    Axis("head_dim", (8, 16, 10, 64, 80, 96, 128, 192, 256), rare=({"head_dim": 512},)),
    Axis("rotary", (1.0, 0.5, 0.25)),
    Axis("interleaved", (False, True), needs="interleaved_rope"),
    Axis("amplitude", (1.0, 1.25)),
    Axis("table", (301, 1, 4097, 16_385, 32_769, 65_537, 131_072), ("Rope.cos", "Rope.sin")),
    Axis("positions", ("random", "first", "last", "edges")),
)


def check_rope(ops: Ops, case: Case) -> None:
    """Rotate heads by unrelated angles, so that each position of the table counts."""
    tokens, d, table = (int_of(case, name) for name in ("tokens", "head_dim", "table"))
    half = max(1, int(d * float(case["rotary"] or 0)) // 2)
    x, rng = Values(tokens)(tokens, int_of(case, "heads"), d), generator(table)
    angles = rng.uniform(0, 6.28, (table, half))
    positions = {"first": np.zeros(tokens), "last": np.full(tokens, table - 1)}.get(
        str(case["positions"]), rng.integers(0, table, tokens)
    )
    if case["positions"] == "edges":
        edges = np.array([table - 1, *around(2**14, 2**15, 2**16), 0])
        positions = np.resize(edges[(edges >= 0) & (edges < table)], tokens)
    cos, sin = (np.float32(case["amplitude"]) * function(angles).astype(np.float32) for function in (np.cos, np.sin))
    positions, inputs = positions.astype(np.int32), Inputs(ops)
    rope = Rope(ops.prepare_vector(cos), ops.prepare_vector(sin), bool(case["interleaved"]))
    found = ops.rope(heads_on(ops, x)[0], rope, inputs("positions", positions))
    inputs.check_unchanged()
    assert_near(ops, found, ORACLE.rope(x, replace(rope, cos=cos, sin=sin), positions))


_ROPE_EDGES: Final = {
    "max_num_batched_tokens": Edge("tokens"),
    "max_model_len": Edge("table"),
    "head_dim": Edge("head_dim", step=2),
}
ROPE: Final[Part[Ops]] = operation_part(
    "rope",
    _ROPE,
    check_rope,
    lambda case: (
        int_of(case, "table") * int_of(case, "head_dim") < 3e6
        and int_of(case, "tokens") * int_of(case, "heads") * int_of(case, "head_dim") < 2e6
    ),
    _ROPE_EDGES,
    needs=("primitives",),
    groups=(("rotary", "interleaved", "amplitude", "table"),),
)


# Keys and values -----------------------------------------------------------------------------------------------------

_KV: Final = (
    Axis("tokens", (9, 1, 2, 33, 65, 129, 513, 1025, 4097)),
    Axis(
        "kv_heads",
        (2, 1, 3, 8),
        rare=(
            *({"kv_heads": heads} for heads in (16, 32, 64)),
            {"kv_heads": 32, "kv_dtype": "int8"},
            {"kv_heads": 64, "tokens": 1025, "head_dim": 8},
        ),
    ),
    Axis("head_dim", (16, 8, 10, 80, 128, 192, 256), rare=({"head_dim": 512},)),
    Axis("block_size", (8, 1, 5, 16, 64, 128), rare=({"block_size": 4096},)),
    Axis(
        "spare_blocks",
        (3, 0, 255, 1023),
        rare=({"spare_blocks": 4400, "block_size": 16, "kv_heads": 1, "head_dim": 8, "order": "last blocks"},),
    ),
    Axis("layers", (2, 1, 5), ("KVShape.num_layers",)),
    Axis("layer", ("last", "first")),
    Axis("kv_dtype", ("auto", *KV_TYPES), ("KVShape.dtype",)),
    Axis("values", ("normal", "zeros", "one large", "tiny", "growing")),
    Axis("order", ("random", "ascending", "descending", "last blocks")),
)
"""`values`: some heads are zeros, have one large element, or are so small that a scale underflows; `growing` ones
double with each head."""
_READ: Final = 4
"""Blocks that attention reads before and after an import."""


def check_kv(ops: Ops, case: Case) -> None:
    """Write keys and values, bit for bit, and nothing else; copy the blocks to other places of another cache.

    Attention then reads there what it reads in the first one, and no longer what it read before.
    """
    kv_heads, d, size, layers = (int_of(case, name) for name in ("kv_heads", "head_dim", "block_size", "layers"))
    slots, undefined = _slots_of(case)
    count = len(undefined)
    shape = KVShape(layers, kv_heads, d, block_size=size, dtype=str(case["kv_dtype"]))
    cache, index = ops.allocate_kv(shape, count), layers - 1 if case["layer"] == "last" else 0
    x, inputs, every = _keys_and_values(ops, case), Inputs(ops), np.arange(count, dtype=np.int32)
    expected = cache.export_blocks(every)
    expected.view(np.uint8)[...] = 0x3F  # a finite number in every format
    cache.import_blocks(every, expected)
    _, keys, values = heads_on(ops, x[:, :kv_heads], x[:, kv_heads:])
    ops.write_kv(cache.layer(index), keys, values, inputs("slots", slots))
    inputs.check_unchanged()
    after = cache.export_blocks(every)
    for side, right in enumerate((x[:, :kv_heads], x[:, kv_heads:])):
        kept = _bits_of(right, expected) if shape.dtype == "auto" else quantize_kv(right, shape.dtype)
        expected[slots // size, index, side, slots % size] = kept
    # Axes of the cache: block, layer, key or value, position, head, element.
    expected[:, index].swapaxes(1, 2)[undefined] = after[:, index].swapaxes(1, 2)[undefined]
    _assert_bits(after, expected, "cache after the write (block, layer, key or value, position, head, element)")
    for some in (every, every[:1]):
        one, two = cache.export_blocks(some), cache.export_blocks(some)
        assert not np.shares_memory(one, two), "exported blocks share memory with the cache"
    other = ops.allocate_kv(shape, count)
    whole = np.flatnonzero(~undefined.any(axis=1))[:_READ].astype(np.int32)
    heads, query = Heads(kv_heads, kv_heads, d, d**-0.5, no_rope(ops)), heads_on(ops, x[:1, :kv_heads])[0]

    def attended(cache: KVCache, blocks: IntArray) -> Floats:
        step = on_device(ops, step_input([(1, len(blocks) * size)], size, blocks[None]))
        return np.array(ops.to_host(ops.attention(query, heads, cache.layer(index), step)), np.float32)

    other.import_blocks(every, np.zeros_like(after))
    if len(whole):
        attended(other, every[::-1][whole])
    given, data = every[::-1].copy(), after.repeat(2, axis=-2)[..., ::2, :]  # heads of a rank, which are not adjacent
    other.import_blocks(given, data)
    given[...], data[...] = 0, 0  # the caller's memory
    if len(whole):
        found = attended(other, every[::-1][whole])
        assert_near(ops, ops.from_host(found), attended(cache, whole))
    _assert_bits(other.export_blocks(every), expected[::-1], "blocks imported in descending order")
    other.import_blocks(every[:1], after[:1])
    _assert_bits(other.export_blocks(every)[1:], expected[::-1][1:], "blocks next to an imported one")
    between = out_of_order(count)
    for blocks in (generator(count).permutation(every)[: 1 + count // 3], between):
        _assert_bits(cache.export_blocks(blocks.copy()), expected[blocks], "some blocks exported")
    other.import_blocks(between, after)
    _assert_bits(
        other.export_blocks(every)[between], expected, "blocks imported of which the first and last are in place"
    )


def _slots_of(case: Case) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return the slots of the tokens of several rows, and the positions [blocks, block_size] that they leave undefined.

    A row begins at any position of a block and goes on in others. What follows its last token in that block means
    nothing; a pack may clear it.
    """
    tokens, size = int_of(case, "tokens"), int_of(case, "block_size")
    lengths = itertools.cycle((1, size + 2, 3 * size, 5))
    rows: list[tuple[int, int]] = []  # begin in the first block, and number of tokens
    while (left := tokens - sum(count for _, count in rows)) > 0:
        rows.append((len(rows) % size, min(left, next(lengths))))
    used = [-(-(begin + count) // size) for begin, count in rows]
    blocks = np.arange(sum(used) + int_of(case, "spare_blocks"))
    match case["order"]:
        case "random":
            blocks = generator(tokens).permutation(blocks)
        case "descending":
            blocks = blocks[::-1]
        case "last blocks":
            blocks = blocks[-sum(used) :]
    undefined = np.zeros((sum(used) + int_of(case, "spare_blocks"), size), np.bool_)
    slots = []
    for (begin, count), first in zip(rows, np.cumsum(used) - used, strict=True):
        places = np.arange(begin, begin + count)
        slots.append(blocks[first + places // size] * size + places % size)
        undefined[slots[-1][-1] // size, slots[-1][-1] % size + 1 :] = True
    return np.concatenate(slots).astype(np.int32), undefined


def _keys_and_values(ops: Ops, case: Case) -> Floats:
    tokens, kv_heads, d = (int_of(case, name) for name in ("tokens", "kv_heads", "head_dim"))
    x = Values(tokens)(tokens, 2 * kv_heads, d)
    match case["values"]:
        case "zeros":
            x[::2, ::2] = 0.0
        case "one large":
            x[::2, :, d // 2] = 1000.0
        case "tiny":
            x[::2, ::2] = np.copysign(2.0**-24 if ops.dtype == "float16" else 2.0**-133, x[::2, ::2])
        case "growing":
            x *= 2.0 ** np.arange(2 * kv_heads)[:, None] / 16
    return x


def _bits_of(values: Floats, like: Any) -> Any:
    """Return values as a cache exports them; uint16 holds the bits of bfloat16."""
    return (values.view(np.uint32) >> 16).astype(np.uint16) if like.dtype == np.uint16 else values.astype(like.dtype)


def _assert_bits(found: Any, expected: Any, what: str) -> None:
    if found.dtype != np.int8:
        found, expected = (float32_of(np.ascontiguousarray(each)) for each in (found, expected))
    assert_same(found, expected, what)


_KV_EDGES: Final = {
    "max_num_batched_tokens": Edge("tokens"),
    "block_size": Edge("block_size"),
    "head_dim": Edge("head_dim", step=2),
}
KV: Final[Part[Ops]] = operation_part(
    "kv",
    _KV,
    check_kv,
    lambda case: (
        (int_of(case, "spare_blocks") * int_of(case, "block_size") + int_of(case, "tokens"))
        * int_of(case, "kv_heads")
        * int_of(case, "head_dim")
        * int_of(case, "layers")
        * 2
        < 6e6
    ),
    _KV_EDGES,
    needs=NEEDS,
)


# Memory beyond 2^31 bytes --------------------------------------------------------------------------------------------

_SIZES: Final = (
    Axis("gib", (0, 2), rare=({"gib": 8},)),
    Axis("kv_dtype", ("auto",), rare=({"gib": 2, "kv_dtype": "int8"},)),
)
"""GiB of the keys of one layer, and of its values: offsets exceed 2^31 bytes, and 2^31 elements in 8 bits."""
_ENDS: Final = 41
"""Blocks that are written and read at each end of a pool, and between; a pool has as many above a power of 2."""


def bytes_of(case: Case) -> int:
    """Return the bytes that a pool or a table of a case needs, without those of a few rows."""
    return 2 * int_of(case, "gib") << 30


def check_pool(ops: Ops, case: Case) -> None:
    """Write the first token of some blocks of a pool; attention over that token alone returns its value.

    Offsets that wrap at a power of 2 are those of the first blocks, which are written to as well.
    """
    size, kv_heads, d = 128, 8, 128
    shape = KVShape(1, kv_heads, d, block_size=size, dtype=str(case["kv_dtype"]))
    count = bytes_of(case) // shape.bytes_per_block(ITEM_BYTES[ops.dtype]) + _ENDS
    cache, rng = ops.allocate_kv(shape, count), generator(count)
    low, high, other = np.arange(_ENDS), np.arange(count - _ENDS, count), rng.permutation(count)[:_ENDS]
    every = rng.permutation(np.unique([low, high, other])).astype(np.int32)
    # Steps of a scale of 1, which each format stores exactly; one element of each head is the largest.
    x = rng.integers(-8, 9, (len(every), 2 * kv_heads, d)).astype(np.float32)
    x[..., 5] = 127.0
    _, keys, values = heads_on(ops, x[:, :kv_heads], x[:, kv_heads:])
    ops.write_kv(cache.layer(0), keys, values, ops.from_host(every * np.int32(size)))
    heads = Heads(kv_heads, kv_heads, d, scale=1.0, rope=no_rope(ops))
    place = np.argsort(every)  # of the blocks, in ascending order
    # If both ends share memory, what was written first is lost, at one of them or the other.
    # The scores of the second one are far below 0, and its softmax is the same.
    for sign, read in ((1, place[:_ENDS]), (-1, place[-_ENDS:]), (1, place[_ENDS:-_ENDS])):
        if not len(read):
            continue
        step = step_input([(1, 1)] * len(every[read]), size, every[read, None])
        queries = heads_on(ops, sign * x[read, :kv_heads])[0]
        found = ops.to_host(ops.paged_attention(queries, cache.layer(0), heads, on_device(ops, step)))
        expected = x[read, kv_heads:].reshape(len(found), -1)
        assert_within(found, expected, 0.25, f"values of blocks {every[read][:3].tolist()}, ... of {count}")
    ends = place[[*range(_ENDS), *range(-_ENDS, 0)]]
    exported = float32_of(cache.export_blocks(every[ends]))[:, 0, :, 0]
    assert_same(exported.reshape(len(ends), -1, d), x[ends], "keys and values of the first and the last blocks")


POOL: Final[Part[Ops]] = Part("pool", _SIZES, check_pool, needs=(*NEEDS, "paged_kv"))


def check_table(ops: Ops, case: Case) -> None:
    """Look up rows at both ends of a table, and around each 2^31 bytes of it."""
    vocabulary, width = 262_147, ITEM_BYTES[ops.dtype]
    hidden = 33 + bytes_of(case) // 2 // (vocabulary * width)
    some = Values(hidden)(1_000_003)
    bits = np.resize((some.view(np.uint32) >> 16).astype(np.uint16), (vocabulary, hidden))
    prepared = ops.prepare_embedding(RawTensor("BF16", bits))
    edges = [(1 << power) // (hidden * width) for power in (15, 16, 31, 32, 33)]
    ids = np.array([0, vocabulary - 1, *around(*(edge for edge in edges if 0 < edge < vocabulary - 1))], np.int32)
    found = ops.to_host(ops.embedding(prepared, ops.from_host(ids)))
    assert_same(np.asarray(found, np.float32), (bits[ids].astype(np.uint32) << 16).view(np.float32), "rows by id")


TABLE: Final[Part[Ops]] = Part("table", (Axis("gib", (0,), rare=({"gib": 2},)),), check_table, needs=("primitives",))
PARTS: Final = (ROPE, KV)
