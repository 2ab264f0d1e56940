"""Axes of recurrent layers: rules, sizes, and the steps of some requests; each case compared with numpy."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fd_core.config.layer_groups import LayerGroups
from fd_core.models.families.spec import DecoderSpec
from fd_core.ops.contract import KV_TYPES, MAX_JOURNAL, KVShape, Norm, Ops, Recurrent
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.weights import ITEM_BYTES
from fd_core.testing.axes.covering import Axis, Case, Value, int_of
from fd_core.testing.axes.layers import NEEDS
from fd_core.testing.axes.parts import Edge, Part
from fd_core.testing.models.arrays import (
    TOLERANCE,
    Floats,
    Values,
    activations,
    assert_near,
    assert_same,
    generator,
    named,
    on_device,
    other_values,
    raw,
    step_input,
)
from fd_core.types import IntArray

_SCAN: Final[Case] = {"rule": "scan"}
_AXES: Final = (
    Axis(
        "rule",
        ("delta", "gate", "scan"),
        ("Recurrent.rule", "Recurrent.decay", "Recurrent.time_bias", "Recurrent.norm"),
    ),
    Axis("rows", (2, 1, 5, 33)),
    Axis("prompt", (9, 1, 33, 65), rare=({"prompt": 33_000, "rule": "gate", "rows": 1, "taps": 2},)),
    Axis("chunk", (1, 5, 40, 129), rare=tuple({"chunk": 8193, **rule} for rule in ({}, {"rule": "gate"}, _SCAN))),
    Axis("rejected", (0, 2, 1, 5, MAX_JOURNAL), ("KVShape.journal",)),
    Axis("key_heads", (1, 2), ("Recurrent.key_heads",)),
    Axis("shared", (2, 1, 5), ("Recurrent.value_heads",)),
    Axis(
        "key_dim",
        (8, 7, 33),
        ("Recurrent.key_dim", "KVShape.state"),
        rare=(
            {"key_heads": 16, "key_dim": 128, "value_dim": 128},
            {**_SCAN, "key_heads": 8, "shared": 16, "key_dim": 128, "value_dim": 64},
            {**_SCAN, "shared": 128, "key_dim": 256, "value_dim": 64, "prompt": 1},
        ),
    ),
    Axis("value_dim", (16, 9, 40), ("Recurrent.value_dim",)),
    Axis("taps", (4, 2, 3), ("Recurrent.conv",)),
    Axis("conv_bias", (False, True), ("Recurrent.conv_bias",)),
    Axis("options", (True, False), ("Recurrent.skip", "Recurrent.time_limits")),
    Axis("blocks", (1, 3)),
    Axis("kv_dtype", ("auto", *KV_TYPES)),
    Axis("moved", (False, True)),
    Axis("composed", (False, True), needs="paged_kv"),
    Axis("again", (False, True)),
)
"""`prompt` and `chunk`: tokens of the first two steps of each row, the latter with `rejected` ones after them; decodes
of some rows follow, `moved` to another cache after the prompts. `blocks` is the size of a block, in those that hold a
state; `options` are those of `scan`; `again` computes with other values first, not twice, for a step changes the states
that it reads."""
_HIDDEN: Final = 38
_USUAL_DRAFTS: Final = 4
"""Drafts that a journal has room for, unless a case rejects more."""
_DECODES: Final = 7
"""Steps after the first two."""
_MOST_FORKS: Final = 24
"""Ends of blocks from which other requests continue."""


class _RecurrentOn:
    """A recurrent block and a cache on one pack, in which only a part of the blocks are of requests."""

    def __init__(self, ops: Ops, case: Case) -> None:
        self.ops, self.case, make = ops, case, Values(7)
        rule, keys, dim = str(case["rule"]), int_of(case, "key_heads"), int_of(case, "key_dim")
        heads, width = keys * int_of(case, "shared"), int_of(case, "value_dim")
        channels = 45 if rule == "gate" else 2 * keys * dim + heads * width

        def vector(*shape: int, scale: float = 0.5) -> Any:
            return ops.prepare_vector(make(*shape, scale=scale))

        more: dict[str, Any] = {}
        if rule != "gate":
            more = {"key_heads": keys, "value_heads": heads, "key_dim": dim, "value_dim": width}
            more |= {"decay": vector(heads), "time_bias": vector(heads)}
            more["norm"] = Norm(vector(width if rule == "delta" else heads * width), 1e-3)
        if rule == "scan" and case["options"]:
            more |= {"skip": vector(heads), "time_limits": (0.5, 1.0)}
        bias = vector(channels) if case["conv_bias"] else None
        self.recurrent = Recurrent(rule, vector(int_of(case, "taps"), channels), bias, **more)  # type: ignore[arg-type]
        self.norm = Norm(ops.prepare_vector(1 + make(_HIDDEN, scale=0.1)), 1e-5)
        self.inputs = ops.prepare_linear([raw(make(self.recurrent.inputs, _HIDDEN, scale=_HIDDEN**-0.5))])
        state, journal = self.recurrent.sizes
        shape = KVShape(2, 4, 64, 1, str(case["kv_dtype"]), groups=LayerGroups(1, 1, 2), state=state, journal=journal)
        least = shape.least_block_size(ITEM_BYTES[ops.dtype], max(_USUAL_DRAFTS, int_of(case, "rejected")))
        self.size = -(-least // 16) * 16 * int_of(case, "blocks")
        self.longest = _longest(case)
        each = -(-self.longest // self.size)
        forks = min(_MOST_FORKS, int_of(case, "rows") * (self.longest // self.size))
        self.count = int_of(case, "rows") * each + forks + 1
        self.tables = np.arange(self.count - 1, forks, -1, dtype=np.int32).reshape(-1, each)
        self.spare = np.arange(1, forks + 1, dtype=np.int32)
        """Blocks for forks."""
        self.shape = KVShape(**{**_fields(shape), "block_size": self.size})
        self.cache = ops.allocate_kv(self.shape, self.count)
        blocks = self.exported()
        blocks.view(np.uint8)[:] = 0xFF  # NaN, as a failed request leaves blocks
        self.cache.import_blocks(np.arange(self.count, dtype=np.int32), blocks)
        self.x = make(int_of(case, "rows"), self.longest, _HIDDEN)

    def exported(self) -> Any:
        return self.cache.export_blocks(np.arange(self.count, dtype=np.int32))

    def move(self) -> None:
        """Continue with the blocks in other places of another cache, as a request that returns or goes elsewhere."""
        held, places = self.exported(), np.roll(np.arange(self.count, dtype=np.int32), 1)
        self.cache.import_blocks(places, np.zeros_like(held))
        self.cache = self.ops.allocate_kv(self.shape, self.count)
        self.cache.import_blocks(places, held)
        self.tables, self.spare = places[self.tables], places[self.spare]

    def fork(self, some: Any, ends: Any) -> Floats:
        """Return the outputs of other requests that continue from the states at some ends of blocks of some rows."""
        tables = self.tables[some]
        tables[np.arange(len(some)), ends // self.size] = self.spare[: len(some)]
        return self.compute(some, ends, ends + 1, tables)

    def compute(self, some: Any, begins: Any, ends: Any, tables: IntArray | None = None) -> Floats:
        """Return the outputs of the tokens between two positions of each of some rows."""
        ops, rows = self.ops, [*zip((ends - begins).tolist(), ends.tolist(), strict=True)]
        step = on_device(ops, step_input(rows, self.size, self.tables[some] if tables is None else tables))
        x = np.concatenate([row[begin:end] for row, begin, end in zip(self.x[some], begins, ends, strict=True)])
        given = activations(ops, x), self.norm, self.inputs, self.recurrent, self.cache.layer(1), step
        y = Ops.recurrence(ops, *given) if self.case["composed"] else ops.recurrence(*given)
        return np.array(ops.to_host(y), np.float32)


def _fields(shape: KVShape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}


def _longest(case: Case) -> int:
    """Return the most tokens of a row: accepted ones, and rejected ones after them."""
    drafted = 1 + int_of(case, "rejected")
    return int_of(case, "prompt") + int_of(case, "rows") + int_of(case, "chunk") + (1 + _DECODES) * drafted


def check_recurrent(ops: Ops, case: Case) -> None:
    """Compare outputs of steps with numpy, and of requests that continue from each block. Raises `AssertionError`."""
    if case["again"]:
        with other_values():
            _check_steps(ops, case)
    _check_steps(ops, case)


def _check_steps(ops: Ops, case: Case) -> None:
    ours, oracle = _RecurrentOn(ops, case), _RecurrentOn(NumpyOps(), case)
    before, tolerance = ours.exported(), max(4 * TOLERANCE[ops.dtype], 1e-4)
    rng, rows = generator(0), np.arange(int_of(case, "rows"))
    at, drafts, moved = 0 * rows, int_of(case, "rejected"), bool(case["moved"])
    # Of every other row the second step is a decode.
    first = int_of(case, "prompt") + rows, np.where(rows % 2, 1, int_of(case, "chunk"))
    for step in range(2 + _DECODES):
        some = rows if step < 2 else rng.permutation(rows)[: rng.integers(1, len(rows) + 1)]
        accepted = first[step][some] if step < 2 else rng.integers(1, 2 + drafts, len(some))
        tokens = accepted + drafts if step == 1 else accepted if step == 0 else np.full(len(some), 1 + drafts)
        found, expected = (side.compute(some, at[some], at[some] + tokens) for side in (ours, oracle))
        assert_near(ops, ops.from_host(found), expected, tolerance)
        at[some] += accepted
        others = rng.permutation(ours.x.shape[1])
        if moved and step == 0:
            ours.move()
        for side in (ours, oracle):  # other tokens follow rejected ones
            side.x = np.where(np.arange(side.longest)[:, None] < at[:, None, None], side.x, side.x[:, others])
    ends = [(row, end) for row in rows for end in range(ours.size, at[row] + 1, ours.size)]
    forks = np.array([ends[index] for index in rng.permutation(len(ends))[:_MOST_FORKS]], np.int32).reshape(-1, 2)
    if len(forks):
        what = f"requests that continue from rows {forks[:, 0].tolist()} at the ends {forks[:, 1].tolist()} of blocks"
        found, expected = (side.fork(*forks.T) for side in (ours, oracle))
        with named(what):
            assert_near(ops, ops.from_host(found), expected, tolerance)
    after = ours.exported()
    if moved:  # block 0 is the last one
        after = np.roll(after, 1, axis=0)
    assert_same(after[:, 0], before[:, 0], "another layer")
    free = [0, *range(1 + len(forks), 1 + len(ours.spare))]
    assert_same(after[free], before[free], "a block of no request")


def _allowed(case: Case) -> bool:
    matrix = int_of(case, "key_heads") * int_of(case, "shared") * int_of(case, "key_dim") * int_of(case, "value_dim")
    drafts = int_of(case, "rejected") if int_of(case, "rejected") > 2 else 0
    tokens = int_of(case, "rows") * (int_of(case, "prompt") + int_of(case, "chunk") + _DECODES * drafts)
    return matrix <= 4000 and tokens <= 800


def _sizes(case: Case) -> dict[str, int]:
    return {"max_num_seqs": int_of(case, "rows"), "max_model_len": _longest(case), "head_dim": 64}


def _of_model(model: DecoderSpec) -> list[Case]:
    """Return some steps over each size of recurrent layers in a model."""
    sizes: dict[tuple[tuple[str, Value], ...], None] = {}
    for each in model.recurrent:
        case: dict[str, Value] = {
            "rule": each.rule,
            "taps": each.conv.shape[-1],
            "conv_bias": each.conv_bias is not None,
        }
        if each.value_heads:
            case |= {"key_heads": each.key_heads, "shared": each.value_heads // each.key_heads}
            case |= {"key_dim": each.key_dim, "value_dim": each.value_dim}
        sizes[tuple(case.items())] = None
    return [{**dict(each), "chunk": 5} for each in sizes]


RECURRENT: Final[Part[Ops]] = Part(
    "recurrent",
    _AXES,
    check_recurrent,
    _allowed,
    {"max_num_seqs": Edge("rows"), "max_model_len": Edge("chunk")},
    sizes=_sizes,
    of_model=_of_model,
    needs=(*NEEDS, "recurs"),
)
