"""Axes of tables, norms and products: sizes, forms of weights and data; each case compared with numpy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, cast, get_args

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import Array, Norm, Ops, PlainActivation
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.weights import FP8, WEIGHT_FORMATS, PackedTensor, RawTensor, Weight
from fd_core.testing.axes.covering import Axis, Case, around, int_of
from fd_core.testing.axes.layers import ACTIVATIONS
from fd_core.testing.axes.parts import Edge, Part
from fd_core.testing.axes.reuse import operation_part
from fd_core.testing.models.arrays import (
    GROUPED,
    PACKED_TOLERANCE,
    STORED,
    Floats,
    Inputs,
    Values,
    activations,
    assert_near,
    assert_same,
    generator,
    heads_on,
    packed_weight,
    raw,
    stored_weight,
)

ORACLE: Final = NumpyOps()
_ROWS: Final = (3, 1, 2, 7, 17, 33, 64, 65, 129, 257, 1025, 8192, 20_001)
_WIDTHS: Final = (128, 1, 2, 7, 33, 129, 1000, 4095, 4104, 8200)
"""Widths beyond any tile, that are a multiple of none."""
_MAX_PRODUCT: Final = 2e8
"""Multiplications of a case."""
_MAX_ELEMENTS: Final = 2e6
"""Elements of any array of a case."""


# Embeddings ----------------------------------------------------------------------------------------------------------

_EMBEDDING: Final = (
    Axis("rows", _ROWS, rare=({"rows": 1, "again": True},)),
    Axis("vocabulary", (1003, 1, 2, 33, 32_769, 65_537, 131_073, 262_208)),
    Axis("hidden", (128, 16, 1, 7, 33, 129, 1000, 4104)),
    Axis("scale", (1.0, 2.0, 48.0**0.5, 0.1)),
    Axis("centred", (False, True)),
    Axis("added", (False, True)),
    Axis("ids", ("random", "edges", "same")),
    Axis("source", ("F32", "F16", "BF16")),
    Axis("packed_table", (None, *sorted(WEIGHT_FORMATS)), rare=({"packed_table": "Q4_1", "hidden": 128},)),
    Axis("stored", STORED),
)
"""`packed_table`: format of a table that stays packed."""


def _embedding_fits(case: Case) -> bool:
    packed, hidden = case["packed_table"], int_of(case, "hidden")
    if not can_be_stored({**case, "packed": packed}) or (packed and (hidden % 128 or case["added"])):
        return False
    return max(int_of(case, "vocabulary"), int_of(case, "rows")) * hidden < 3 * _MAX_ELEMENTS


def check_embedding(ops: Ops, case: Case) -> None:
    """Look up rows of a table, also where ids exceed 16 bits."""
    rows, vocabulary, hidden = (int_of(case, name) for name in ("rows", "vocabulary", "hidden"))
    stored = _weight(
        Values(rows), (vocabulary, hidden), {**case, "packed": case["packed_table"], "group": None}, hidden**0.5
    )
    table, inputs, rng = stored.to_float32(), Inputs(ops), generator(rows)
    ids = rng.integers(0, vocabulary, rows)
    if case["ids"] == "edges":
        edges = np.array([0, vocabulary - 1, *around(2**15, 2**16, 2**17), vocabulary // 2])
        ids = edges[edges < vocabulary][np.arange(rows) % (edges < vocabulary).sum()]
    elif case["ids"] == "same":
        ids[:] = vocabulary - 1
    scale, prepared = float(case["scale"] or 0), ops.prepare_embedding(stored)
    rows_of_table, more = inputs("ids", ids.astype(np.int32)), {"centred": True} if case["centred"] else {}
    if case["added"]:
        x = Values(rows + 1)(rows, hidden)
        found, expected = ops.add_positions(activations(ops, x), prepared, rows_of_table), x + table[ids]
    else:
        found, expected = ops.embedding(prepared, rows_of_table, scale, **more), table[ids] * np.float32(scale)
        expected = expected - expected.mean(axis=1, keepdims=True) if more else expected
    inputs.check_unchanged()
    assert_near(ops, found, expected)


_EMBEDDING_EDGES: Final = {
    "max_num_batched_tokens": Edge("rows"),
    "vocab_size": Edge("vocabulary"),
    "hidden": Edge("hidden"),
}
EMBEDDING: Final[Part[Ops]] = operation_part(
    "embedding", _EMBEDDING, check_embedding, _embedding_fits, _EMBEDDING_EDGES, needs=("primitives",)
)


# Norms ---------------------------------------------------------------------------------------------------------------

_NORM: Final = (
    Axis("rows", _ROWS),
    Axis("width", (*_WIDTHS, 16_384)),
    Axis("heads", (0, 1, 3, 8), rare=({"heads": 32, "rows": 4097, "width": 7},)),
    Axis("eps", (1e-5, 1e-6, 1e-12, 0.1, 1.0), ("Norm.eps",)),
    Axis("size", (1.0, 1e-3, 300.0)),
    Axis("odd", (None, "zeros", "nan")),
    Axis("weight", ("about 1", "about 0"), ("Norm.weight",)),
    Axis("bias", (False, True), ("Norm.bias",), needs="encoders"),
)
"""`heads` 0 is a norm of activations, others of heads; `size` is that of the elements, which eps exceeds or not;
`odd`: one row is zeros or NaN; activations alone have norms with a bias."""


def check_norm(ops: Ops, case: Case) -> None:
    """Normalize activations or heads, with an odd row among them."""
    rows, width, count = (int_of(case, name) for name in ("rows", "width", "heads"))
    make = Values(rows)
    weight = make(width) if case["weight"] == "about 0" else 1 + make(width, scale=0.1)
    x = make(rows, max(count, 1) * width, scale=float(case["size"] or 0))
    well = np.ones(rows, np.bool_)
    if case["odd"] is not None and rows > 1:
        x[rows // 2], well[rows // 2] = (0.0, True) if case["odd"] == "zeros" else (np.nan, False)
    device = heads_on(ops, x.reshape(rows, count, width))[0] if count else activations(ops, x)
    bias = make(width) if case["bias"] and not count else None
    norm = Norm(ops.prepare_vector(weight), float(case["eps"] or 0), None if bias is None else ops.prepare_vector(bias))
    expected = ORACLE.normalize(x.reshape(rows, -1, width), Norm(weight, norm.eps, bias))[well]
    found = np.asarray(ops.to_host(ops.normalize(device, norm)), np.float32).reshape(rows, -1, width)[well]
    assert_near(ops, ops.from_host(found), expected)


_NORM_EDGES: Final = {"max_num_batched_tokens": Edge("rows"), "hidden": Edge("width")}
NORM: Final[Part[Ops]] = operation_part(
    "rms_norm",
    _NORM,
    check_norm,
    lambda case: int_of(case, "rows") * int_of(case, "width") * max(1, int_of(case, "heads")) < _MAX_ELEMENTS,
    _NORM_EDGES,
    needs=("primitives",),
)


# Activations ---------------------------------------------------------------------------------------------------------

_ACTIVATE: Final = (
    Axis("rows", _ROWS),
    Axis("width", _WIDTHS),
    Axis("activation", get_args(PlainActivation)),
    Axis("size", (1.0, 1e-3, 30.0)),
    Axis("odd", (None, "zeros", "nan")),
)
"""`size` is that of the elements: the largest are where an activation is 0 or the identity."""


def check_activate(ops: Ops, case: Case) -> None:
    """Apply an activation, with an odd row among the others."""
    rows, width = int_of(case, "rows"), int_of(case, "width")
    x = Values(rows)(rows, width, scale=float(case["size"] or 0))
    if case["odd"] is not None and rows > 1:
        x[rows // 2] = 0.0 if case["odd"] == "zeros" else np.nan
    kind = cast(PlainActivation, case["activation"])
    found = np.asarray(ops.to_host(ops.activate(activations(ops, x), kind)), np.float32)
    finite = np.isfinite(x)
    assert np.isnan(found[~finite]).all(), "NaN became a number"
    assert_near(ops, ops.from_host(found[finite]), ORACLE.activate(x[finite], kind))


_ACTIVATE_EDGES: Final = {"max_num_batched_tokens": Edge("rows"), "inner": Edge("width")}
ACTIVATE: Final[Part[Ops]] = operation_part(
    "activate",
    _ACTIVATE,
    check_activate,
    lambda case: int_of(case, "rows") * int_of(case, "width") < _MAX_ELEMENTS,
    _ACTIVATE_EDGES,
    needs=("primitives", "ungated"),
)


# Gates of attention ---------------------------------------------------------------------------------------------------

_GATE: Final = (
    Axis("rows", _ROWS),
    Axis("width", _WIDTHS),
    Axis("fused", (False, True)),
    Axis("size", (1.0, 1e-3, 30.0)),
)
"""`size` is that of the gates: the largest close or open."""


def check_gate(ops: Ops, case: Case) -> None:
    """Multiply outputs of heads by the sigmoid of gates, which a linear computes of the layer's inputs if fused."""
    rows, width, inputs = int_of(case, "rows"), int_of(case, "width"), 64
    make, size = Values(rows), float(case["size"] or 0)
    a, gates, x = make(rows, width), make(rows, width, scale=size), make(rows, inputs)
    weight, scale = raw(make(width, inputs, scale=size * inputs**-0.5)), 1 + make(inputs, scale=0.1)
    results = []
    for pack in (ops, ORACLE):
        outputs = activations(pack, a)
        if case["fused"]:
            norm = Norm(pack.prepare_vector(scale), 1e-5)
            found = pack.gated_attention(outputs, activations(pack, x), norm, pack.prepare_linear([weight]))
        else:
            found = pack.gate_heads(outputs, activations(pack, gates))
        results.append(found)
    assert_near(ops, results[0], np.asarray(results[1]))


def _gate_fits(case: Case) -> bool:
    # A pack rounds large gates that it computes.
    return int_of(case, "rows") * int_of(case, "width") < _MAX_ELEMENTS and not (case["fused"] and case["size"] == 30.0)


GATE: Final[Part[Ops]] = operation_part(
    "gate", _GATE, check_gate, _gate_fits, _ACTIVATE_EDGES, needs=("primitives", "recurs")
)


# More than 2^24 elements ---------------------------------------------------------------------------------------------

_OPERATIONS: Final = ("activate", "norm", "add", "linear", "gather")
ELEMENTS_BYTES: Final = 5 << 26
"""Bytes of the largest operation, with its input in float32 and the result on the host."""


def check_elements(ops: Ops, case: Case) -> None:
    """Compute more than 2^24 elements from a few rows again and again: each is near the first ones.

    Their bits may differ, as sums and vectors of some packs depend on the number of rows.
    """
    rows, width, count, name = 2051, 2**24 // 2051 + 9, 7, str(case["operation"])
    norm, column = Norm(ops.prepare_vector(np.ones(width, np.float32)), 1e-5), raw(Values(8)(width, 1))
    compute: Callable[[Array], Array] = {
        "gate": lambda x: ops.gate(x, "silu"),
        "activate": lambda x: ops.activate(x, "relu2"),
        "norm": lambda x: ops.normalize(x, norm),
        "add": lambda x: ops.add(x, x),
        "linear": lambda x: ops.linear(x, ops.prepare_linear([column])),
        "gather": lambda x: x,
    }[name]
    few = activations(ops, Values(7)(count, {"gate": 2 * width, "linear": 1}.get(name, width)))
    right, ids = np.array(ops.to_host(compute(few))), np.arange(rows, dtype=np.int32) % count
    found = np.asarray(ops.to_host(compute(ops.gather_rows(few, ops.from_host(ids)))), np.float32)
    for row in range(count):
        rows_like_it = found[row::count]
        assert_near(ops, ops.from_host(rows_like_it), np.broadcast_to(right[row], rows_like_it.shape))


ELEMENTS: Final[Part[Ops]] = Part(
    "elements",
    (Axis("operation", ("gate",), rare=tuple({"operation": name} for name in _OPERATIONS)),),
    check_elements,
    needs=("primitives",),
)


# Linears -------------------------------------------------------------------------------------------------------------

_LINEAR: Final = (
    Axis("rows", _ROWS),
    Axis("inputs", (*_WIDTHS, 14_336), rare=({"inputs": 28_672},)),
    Axis("outputs", (48, 1, 2, 33, 129, 1000, 4097)),
    Axis("parts", (1, 2, 3)),
    Axis("bias", (False, True), needs="biases"),
    Axis("gated", (None, *ACTIVATIONS)),
    Axis("apart", (False, True)),
    Axis("source", ("F32", "F16", "BF16")),
    Axis("packed", (None, *sorted(WEIGHT_FORMATS))),
    Axis("group", (None, 32, 128, "row")),
    Axis("stored", STORED),
    Axis("second", ("same", "F32", "F16", "Q8_0", "Q4_1"), rare=({"second": "Q8_0", "parts": 2},)),
    Axis("data", ("alike", "large", "apart", "nan", "zeros")),
)
"""`outputs` of each part; a gated linear has two, and computes gate and up `apart` from the activation or with it.

`group`: values that share a scale, of formats in which it varies. `stored`: form of weights. `second`: format or dtype
of the second part. `data`: rows of similar size, large ones, which saturate an activation, odd ones a 64th of the
others, one of NaN, or of zeros."""


def can_be_stored(case: Case) -> bool:
    """Return True unless only other formats of packed weights have the form."""
    stored = str(case["stored"])
    if case["packed"] is None:
        return stored in ("usual", "by columns", "sliced")
    formats = ("gptq",) if "8 bits" in stored else GROUPED[:-1] if "minima" in stored else WEIGHT_FORMATS
    return stored == "usual" or case["packed"] in formats


def _linear_fits(case: Case) -> bool:
    outputs = int_of(case, "outputs") * (2 if case["gated"] else int_of(case, "parts"))
    if case["gated"] and (case["bias"] or case["parts"] != 1):
        return False
    if (case["apart"] and not case["gated"]) or (
        {case["packed"], case["second"]} & WEIGHT_FORMATS and int_of(case, "inputs") % 128
    ):
        return False
    if case["group"] is not None and case["packed"] not in GROUPED:
        return False
    if not can_be_stored(case):
        return False
    if case["second"] != "same" and not case["gated"] and case["parts"] == 1:
        return False
    weights = outputs * int_of(case, "inputs")
    activated = int_of(case, "rows") * max(outputs, int_of(case, "inputs"))
    return weights * int_of(case, "rows") < _MAX_PRODUCT and max(weights, activated) < _MAX_ELEMENTS


def check_linear(ops: Ops, case: Case) -> None:
    """Multiply rows by stacked weights; the first and the last inputs count eight times as much as the others."""
    rows, inputs, outputs = (int_of(case, name) for name in ("rows", "inputs", "outputs"))
    make, gated = Values(rows), case["gated"]
    x = make(rows, inputs)
    x[:, [0, -1]] *= 8
    scale = np.ones((rows, 1), np.float32)
    scale[:] = 64 if case["data"] == "large" else scale
    scale[1::2] /= 64 if case["data"] == "apart" else 1
    x *= scale
    well = np.ones(rows, np.bool_)
    if case["data"] in ("nan", "zeros") and rows > 1:
        x[rows // 2], well[rows // 2] = (0.0, True) if case["data"] == "zeros" else (np.nan, False)
    # Products of a large gate and a small up fit in float16.
    sizes = [1.0, 1 / 512 if gated and case["data"] == "large" else 1.0, 1.0][: 2 if gated else int_of(case, "parts")]
    kinds = [case, _second(ops, case), case][: len(sizes)]
    parts = [_weight(make, (outputs, inputs), kind, size) for kind, size in zip(kinds, sizes, strict=True)]
    biases = [_stored(make(outputs), case) for _ in parts] if case["bias"] else None
    results = []
    for pack in (ops, ORACLE):
        weight, device = pack.prepare_linear(parts, biases, gated=bool(gated)), activations(pack, x)
        if not gated:
            results.append((pack, pack.linear(device, weight)))
        elif case["apart"]:
            results.append((pack, pack.gate(pack.gate_up(device, weight), gated)))  # type: ignore[arg-type]
        else:
            results.append((pack, pack.gated_linear(device, weight, gated)))  # type: ignore[arg-type]
    tolerance = max((PACKED_TOLERANCE[str(kind["packed"])] for kind in kinds if kind["packed"]), default=None)
    # So that no row is small compared with the largest result.
    factor = (scale ** (-2 if gated else -1) if case["data"] == "apart" else np.ones_like(scale))[well]
    found, expected = (np.asarray(pack.to_host(each), np.float32)[well] * factor for pack, each in results)
    usual = (0.1 if inputs > 33 else 1.0) if gated else 0.5
    if tolerance:
        # The largest input determines how a pack rounds the others; a few results may all be small.
        alike = x[well] / (scale[well] if case["data"] == "apart" else 1)
        norms = [float(np.linalg.norm(part.to_float32(), axis=1).max()) for part in parts]
        usual = 0.5 * float(np.abs(alike).max()) * (norms[0] * norms[1] * float(alike.std()) if gated else max(norms))
    assert_near(ops, ops.from_host(found), expected, tolerance, at_least=usual)


_LINEAR_EDGES: Final = {"max_num_batched_tokens": Edge("rows"), "inner": Edge("inputs")}
LINEAR: Final[Part[Ops]] = operation_part(
    "linear", _LINEAR, check_linear, _linear_fits, _LINEAR_EDGES, mixed=True, needs=("primitives",)
)


# Heads of a model ----------------------------------------------------------------------------------------------------

_HEAD: Final = (
    Axis("rows", (3, 0, 1, 2, 8, 33, 65, 129, 257)),
    Axis("hidden", (128, 1, 7, 16, 33, 129, 256, 1000, 4104)),
    Axis("vocabulary", (1003, 1, 2, 33, 1025, 32_769, 65_537, 131_073, 262_208)),
    Axis("softcap", (None, 1.5, 30.0), rare=({"softcap": 1.5, "vocabulary": 131_073, "hidden": 33},), needs="softcap"),
    Axis("tied", (False, True, "with a bias")),
    Axis("source", ("F32", "F16", "BF16")),
    Axis("stored", STORED),
    Axis(
        "packed",
        (None, *sorted(WEIGHT_FORMATS)),
        rare=tuple({"packed": name, "vocabulary": 131_073, "hidden": 128} for name in ("Q4_K", "int8", "int4", FP8)),
    ),
    Axis(
        "table",
        ("source", "same", "Q8_0"),
        rare=tuple(
            {"table": table, "packed": "int8", "tied": tied, "hidden": 128}
            for table, tied in (("same", "with a bias"), ("Q8_0", True))
        ),
    ),
    Axis("wild", (False, True)),
    Axis("rows_of", ("all", "some")),
    Axis("size", (1.0, 256.0)),
)
"""`rows_of` some tokens of a step, with the norm before: `Ops.logits`. `size` of the states: large ones saturate a
softcap. `packed`: format of the projection; `table`: that of a tied one is not packed, packed as well, or packed in
another format, if the pack keeps it packed; `wild`: one of the states is NaN."""


def check_head(ops: Ops, case: Case) -> None:
    """Compute float32 logits, alone and with the final norm of some rows of a step."""
    rows, hidden, vocabulary = (int_of(case, name) for name in ("rows", "hidden", "vocabulary"))
    make, softcap = Values(rows), case["softcap"]
    table = _stored(_precise(make(vocabulary, hidden, scale=hidden**-0.5), case), case)
    size = float(case["size"] or 0)
    x, norm = make(max(2 * rows, 1), hidden, scale=size), 1 + make(hidden, scale=0.1)
    picked = generator(rows).permutation(2 * rows)[:rows].astype(np.int32)
    packed = None if case["packed"] is None else str(case["packed"])
    weight = _weight(make, (vocabulary, hidden), {**case, "group": None}) if packed else table
    other = _weight(make, (vocabulary, hidden), {**case, "packed": "Q8_0", "group": None}) if packed else table
    other = weight if packed == "Q8_0" else other  # a tied head of one format is its table
    biases = [raw(make(vocabulary, scale=0.5))] if case["tied"] == "with a bias" else []
    well = np.ones(rows, np.bool_)
    if case["wild"] and rows > 1:
        well[rows // 2] = False
        x[picked[rows // 2] if case["rows_of"] == "some" else rows // 2] = np.nan
    results = []
    for pack in (ops, ORACLE):
        kept = {"same": weight, "Q8_0": other}.get(str(case["table"]), table)
        kept = kept if not isinstance(kept, PackedTensor) or kept.format in pack.table_formats else table
        embedding = pack.prepare_embedding(kept)
        head = pack.tied_head(embedding, weight, *biases) if case["tied"] else pack.prepare_linear([weight])
        device = activations(pack, x)
        if case["rows_of"] == "some":
            given = Norm(pack.prepare_vector(norm * np.float32(size)), 1e-5)
            results.append(pack.logits(device, given, head, pack.from_host(picked), softcap))  # type: ignore[arg-type]
        else:
            device = pack.gather_rows(device, pack.from_host(np.arange(rows, dtype=np.int32)))
            results.append(pack.logits_of(device, head, softcap))  # type: ignore[arg-type]
    found = np.asarray(ops.to_host(results[0]))
    assert found.dtype == np.float32, f"logits are {found.dtype}, expected float32"
    found, expected = found[well], results[1][well]
    if softcap is not None and case["size"] != 1.0:
        # Rounding of a large logit changes those that are not capped.
        free = np.isfinite(found) & (np.abs(expected) < (1 - 1e-6) * float(softcap))
        found = np.where(free, expected, found)
    if rows:
        # Activations are rounded before the cap, where the largest of many logits is about 3.
        usual = 3.0 if packed and softcap is not None and vocabulary > 1000 else 0.5
        assert_near(ops, ops.from_host(found), expected, PACKED_TOLERANCE[packed] if packed else None, at_least=usual)


_HEAD_EDGES: Final = {"hidden": Edge("hidden"), "vocab_size": Edge("vocabulary")}
HEAD: Final[Part[Ops]] = operation_part(
    "logits_of",
    _HEAD,
    check_head,
    lambda case: (
        not (case["packed"] and (int_of(case, "hidden") % 128 or (case["softcap"] and case["size"] != 1.0)))
        and can_be_stored(case)
        and int_of(case, "vocabulary") * max(int_of(case, "hidden"), int_of(case, "rows")) < 3 * _MAX_ELEMENTS
        and int_of(case, "rows") * int_of(case, "vocabulary") * int_of(case, "hidden") < _MAX_PRODUCT
    ),
    _HEAD_EDGES,
    needs=("primitives",),
)


# Transfers -----------------------------------------------------------------------------------------------------------

_TRANSFER: Final = (
    Axis("dtype", ("int32", "float32", "int64", "uint64", "uint8")),
    Axis("size", (9, 0, 1, 2, 33, 65_537, 1_000_003)),
    Axis("columns", (1, 3, 257)),
    Axis("writable", (True, False)),
    Axis("by", ("from_host", "upload", "states_from_host")),
    Axis("in_flight", (1, 2, 3, 17)),
)
"""`in_flight`: copies to the host that are queued, of other arrays each, before one of them is read."""


_COPY_SECONDS: Final = 5.0
"""Time for copies of a few MB to end."""


def check_transfer(ops: Ops, case: Case) -> None:
    """Copy arrays to the device and back; a queued copy holds the values at the time of the call."""
    dtype = np.dtype(str(case["dtype"]))
    values = generator(0).integers(0, 2**63, (int_of(case, "size"), int_of(case, "columns")))
    array = (values % 2**24).astype(dtype) if dtype.kind == "f" else values.astype(np.uint64).astype(dtype)
    if case["by"] == "states_from_host":
        array = Values(1)(*array.shape)
        array = array * np.float32(1.1) if ops.dtype == "float32" else array
    array.flags.writeable = bool(case["writable"]) or not len(array)

    def sent(array: npt.NDArray[Any]) -> Array:
        if case["by"] != "upload":
            return getattr(ops, str(case["by"]))(array)
        first, device = ops.upload([np.arange(3, dtype=np.int32), array])
        assert_same(np.asarray(ops.to_host(first)), np.arange(3, dtype=np.int32), "the array uploaded before")
        return device

    device, _ = sent(array), sent(array[::-1].copy())
    later = ops.fetch_later([device])
    found = [np.array(each) for each in (*ops.fetch([device]), *later.wait(), *later.wait(), ops.to_host(device))]
    for what, each in zip(("fetch", "fetch_later", "the same copy again", "to_host"), found, strict=True):
        bits = each.view(np.uint64) if each.dtype == np.int64 and dtype == np.uint64 else each
        assert_same(bits, array, what)
    others = [np.roll(array, at, axis=0) for at in range(int_of(case, "in_flight"))]
    queued = [ops.fetch_later([sent(each)]) for each in others]
    deadline = time.monotonic() + _COPY_SECONDS
    for at, (copies, right) in enumerate(zip(queued, others, strict=True)):
        while not copies.ready():
            late = f"`ready` of copy {at} is False after {_COPY_SECONDS:g} s; an engine waits until it is True"
            assert time.monotonic() < deadline, late
            time.sleep(1e-3)
        each = np.asarray(copies.wait()[0])
        bits = each.view(np.uint64) if each.dtype == np.int64 and dtype == np.uint64 else each
        assert_same(bits, right, f"copy {at} of {len(others)} in flight")


TRANSFER: Final[Part[Ops]] = operation_part(
    "transfers",
    _TRANSFER,
    check_transfer,
    lambda case: (
        int_of(case, "size") * int_of(case, "columns") * int_of(case, "in_flight") < 8e6
        and (case["by"] != "states_from_host" or (case["dtype"] == "float32" and case["writable"] is True))
    ),
)

PARTS: Final = (TRANSFER, EMBEDDING, NORM, ACTIVATE, GATE, LINEAR, HEAD)
"""In the order of the contract."""


def _precise(values: Floats, case: Case) -> Floats:
    """Return values with all bits of float32 for a float32 checkpoint, which a pack of that dtype may not round."""
    return values * np.float32(1.1) if case["source"] == "F32" else values


def _second(ops: Ops, case: Case) -> Case:
    """Return the case with the format and the dtype of the second part."""
    if case["second"] == "same":
        return case
    kind = "packed" if case["second"] in ops.weight_formats else "source"
    return {**case, "packed": None, kind: case["second"]}


def _stored(values: Floats, case: Case) -> RawTensor:
    """Return a weight as read from a checkpoint, in the dtype that the case names."""
    return stored_weight(values, str(case["source"]), str(case.get("stored", "usual")) if values.ndim > 1 else "usual")


def _weight(make: Values, shape: tuple[int, int], case: Case, size: float = 1.0) -> Weight:
    scale = size * shape[1] ** -0.5
    if case["packed"] is not None:
        group = shape[1] if case["group"] == "row" else case["group"] and int_of(case, "group")
        return packed_weight(str(case["packed"]), *shape, group or None, scale, str(case["stored"]), make.seed())
    return _stored(_precise(make(*shape, scale=scale), case), case)
