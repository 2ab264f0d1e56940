"""Axes of operations on logits and token ids: rows, vocabulary, parameters and data; each case exactly as in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import Ops, PenaltyInput, SampleInput
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.axes.covering import Axis, Case, Value, around, int_of
from fd_core.testing.axes.parts import Edge, Part
from fd_core.testing.axes.reuse import operation_part
from fd_core.testing.models.arrays import (
    Floats,
    Inputs,
    activations,
    assert_same,
    generator,
    penalty_input,
    sample_input,
)
from fd_core.types import IntArray

ORACLE: Final = NumpyOps()
MIXED: Final = "mixed"
"""A different one of the axis's other values in each row."""

_ROWS: Final = (5, 1, 2, 33, 64, 65, 129, 257)
_VOCABULARIES: Final = (1003, 33, 1025, 32_767, 32_769, 65_537, 131_073)
_EDGES: Final = tuple(
    {"vocabulary": vocabulary}
    for vocabulary in (1, 2, 31, 64, 2**15, 2**16 - 1, 2**16, 2**17 - 1, 2**17, 151_936, 262_208)
)
_BATCH: Final = {"rows": 129, "vocabulary": 151_936}
"""More than 2^24 logits, as of a large batch of a large model."""
_MAX_LOGITS: Final = 1_400_000
"""Logits of a case, which numpy sorts in about 0.1 seconds."""
_OF_LOGITS: Final = {"vocab_size": Edge("vocabulary")}
_LOGITS: Final = (
    "even",
    "normal",
    "ties",
    "equal",
    "peaked",
    "falling",
    "masked",
    "one left",
    "huge",
    "nan",
    "inf",
    "none",
)


def _small(case: Case) -> bool:
    return int_of(case, "rows") * int_of(case, "vocabulary") <= _MAX_LOGITS


def logits_of(case: Case) -> Floats:
    """Return the logits of a case: in every second row of its kind, in the others `even`.

    `even` ones have nearly equal weights, so that the choice changes with each token that a filter keeps or drops.
    `nan`, `inf` and `none` are one to three rows without a finite peak among healthy ones.
    """
    rows, vocabulary, kind = int_of(case, "rows"), int_of(case, "vocabulary"), case["logits"]
    rng = _random(case)
    logits: Floats = rng.standard_normal((rows, vocabulary), np.float32) * np.float32(0.2)
    strange = rng.permutation(rows)[: 1 + (rows > 3) + (rows > 9)]
    some = logits[(rows - 1) % 2 :: 2]
    match kind:
        case "normal" | "peaked" | "huge":
            some *= np.float32({"normal": 10.0, "peaked": 150.0, "huge": 5e35}[kind])
        case "ties":
            some[:] = np.round(10 * some)  # including -0.0
        case "equal":
            some[:] = 0.0
            some[:, 1::2] = -0.0
        case "falling":
            some[:] = np.linspace(0.5, -0.5, vocabulary, dtype=np.float32)
        case "masked":
            some[rng.random(some.shape) < 0.9] = -np.inf
            some[:, rng.integers(0, vocabulary)] = 0.1
        case "one left":
            some[:] = -np.inf
            some[::2, 0] = some[1::2, -1] = -3.0
        case "nan" | "inf":
            values = [-np.nan, np.nan, -np.nan] if kind == "nan" else [np.inf] * 3  # 0 / 0 has a sign on x86
            places = [0, vocabulary - 1, vocabulary // 2]
            logits[strange, places[: len(strange)]] = values[: len(strange)]
        case "none":
            logits[strange] = -np.inf
    return logits


# Sampling ------------------------------------------------------------------------------------------------------------

_HEATS: Final = (1.0, 0.0, 1e-5, 0.3, 1.7, 100.0, MIXED)
_TOP_K: Final = (0, 1, 2, 8, 9, 50, 64, 65, 257, 1024, 1025, 16_385, 65_537, 2**31 - 1, MIXED)
_TOP_P: Final = (1.0, 0.0, 1e-6, 0.1, 0.5, 0.9, 0.9999, MIXED)
_MIN_P: Final = (0.0, 1e-6, 0.05, 0.6, 0.99, 1.0, MIXED)
_SEEDS: Final = ("random", *(n for power in (31, 32, 63) for n in (2**power - 1, 2**power)), 0, 2**64 - 1)

_OUTERMOST: Final = (12_121_362, 16_390_493)
"""Seeds whose random number at position 0 is 0, and the largest one below 1."""


def _alone(name: str, values: Sequence[Value], **others: Value) -> tuple[Case, ...]:
    """Return rare cases with one value each, which no other filter hides."""
    return tuple({name: value, **others} for value in values[1:])


_SAMPLE: Final = (
    Axis("rows", _ROWS, rare=({"rows": 1025}, {"rows": 193, "vocabulary": 65_537, "temperature": 0.0})),
    Axis(
        "vocabulary",
        _VOCABULARIES,
        rare=(*_EDGES, {**_EDGES[-1], "logits": "one left", "temperature": 0.0, "spread": "all rows"}),
    ),
    Axis("logits", _LOGITS),
    Axis(
        "temperature",
        _HEATS,
        ("SampleInput.temperature", "SampleInput.all_greedy"),
        rare=_alone("temperature", _HEATS, logits="falling", rows=33),
    ),
    Axis("top_k", _TOP_K, ("SampleInput.top_k", "SampleInput.any_filter"), _alone("top_k", _TOP_K, vocabulary=131_073)),
    Axis("top_p", _TOP_P, ("SampleInput.top_p",), _alone("top_p", _TOP_P, rows=65)),
    Axis("min_p", _MIN_P, ("SampleInput.min_p",), _alone("min_p", _MIN_P, rows=65)),
    Axis("seed", _SEEDS, ("SampleInput.seeds",), tuple({"seed": seed, "logits": "masked"} for seed in _OUTERMOST)),
    Axis("position", (0, "random", 2**15, 2**16, 2**24 + 1, 2**31 - 1), ("SampleInput.positions",)),
    Axis("promises", ("by row", "by random row")),
    Axis(
        "spread",
        ("some rows",),
        rare=tuple(
            {"spread": "all rows", "rows": 65, "logits": logits, **values}
            for logits in _LOGITS
            for values in ({}, {"temperature": 0.0}, {"top_k": 50, "top_p": 0.9, "min_p": 0.05})
        ),
    ),
)
"""`spread`: each row has each value of the case or the plainest one, at random, so that no value hides all others."""


def sample_input_of(case: Case) -> SampleInput:
    """Return the parameters of a case; seeds and positions are on both sides of their value."""
    rows, rng = int_of(case, "rows"), _random(case)
    apart = np.arange(rows)
    apart = np.where(apart % 2, -1, 1) * ((apart + 1) // 2)
    if case["seed"] == "random":
        seeds = rng.integers(0, 2**64, rows, dtype=np.uint64)
    else:
        seeds = np.array(int_of(case, "seed"), np.uint64) + apart.astype(np.uint64)
    if case["position"] == "random":
        positions = rng.integers(0, 2**31, rows)
    else:
        positions = np.abs(int_of(case, "position") + apart)
        positions = np.where(positions < 2**31, positions, 2**32 - 1 - positions)
    columns = {name: _column(case, name, rng) for name in ("temperature", "top_k", "top_p", "min_p")}
    made = sample_input(rows, seeds=seeds, positions=positions, **columns)
    random = made.temperature > 0
    filters = (made.top_k > 0) | (made.top_p < 1) | (made.min_p > 0)
    # The runner ignores filters of greedy rows, which do not need them.
    used = filters & random if case["promises"] == "by random row" else filters
    return SampleInput(
        **{name: getattr(made, name) for name in (*columns, "seeds", "positions")},
        all_greedy=not random.any(),
        any_filter=bool(used.any()),
    )


def check_sample(ops: Ops, case: Case) -> None:
    """Compare tokens and peaks with numpy's; the token of a row without a finite peak is any one of the vocabulary."""
    logits, parameters, inputs = logits_of(case), sample_input_of(case), Inputs(ops)
    tokens, peaks = map(np.asarray, ops.fetch(ops.sample(ops.from_host(logits.copy()), inputs.of(parameters))))
    right, right_peaks = ORACLE.sample(logits, parameters)
    inputs.check_unchanged()
    finite = np.isfinite(right_peaks)
    assert tokens.dtype == np.int32 and tokens.shape == right.shape, f"tokens are {tokens.dtype}{list(tokens.shape)}"
    assert_same(np.isfinite(peaks), finite, "peaks are finite")
    assert_same(peaks[finite], right_peaks[finite], "peaks of the finite rows")
    assert ((tokens >= 0) & (tokens < logits.shape[1])).all(), f"tokens {tokens.tolist()} of {logits.shape[1]}"
    assert_same(np.where(finite, tokens, 0), np.where(finite, right, 0), "tokens by row")


SAMPLE: Final[Part[Ops]] = operation_part("sample", _SAMPLE, check_sample, _small, _OF_LOGITS)


# Penalties -----------------------------------------------------------------------------------------------------------

_FACTORS: Final = (0.0, 0.3, -0.1, 2.0, -2.0, MIXED)
_PENALIZE: Final = (
    Axis("rows", _ROWS, rare=(_BATCH,)),
    Axis("penalized", ("all", "half", 1, 0), ("PenaltyInput.rows",)),
    Axis("vocabulary", _VOCABULARIES, rare=_EDGES),
    Axis("logits", _LOGITS),
    Axis("slots", ("as rows", 1, 8, 300), ("PenaltyInput.counts_rows",)),
    Axis(
        "count",
        (9, 0, 1, 2, 129, 257, 513, 2**15 + 1, 2**16 + 1, 2**17 + 1, 2**24 + 1, 2**30 + 1),
        ("PenaltyInput.counts",),
    ),
    Axis("repetition", (1.3, 1.0, 0.7, 0.01, 10.0, MIXED), ("PenaltyInput.repetition",)),
    Axis("presence", (0.7, *_FACTORS), ("PenaltyInput.presence",)),
    Axis("frequency", (0.1, *_FACTORS), ("PenaltyInput.frequency",)),
    Axis("drafts", (0, 1, 2, 7, 16), ("PenaltyInput.draft_rows",)),
    Axis("draft_ids", ("random", "repeated", "counted", "last"), ("PenaltyInput.draft_ids",)),
    Axis("spread", ("some rows", "all rows")),
)


def penalty_input_of(case: Case) -> PenaltyInput:
    """Return the penalties of a case: some rows in random order, with counts in another order.

    A third of the counts is 0, a third the largest of the case, and the others are below it.
    """
    rng, rows, vocabulary, most = _random(case), int_of(case, "rows"), int_of(case, "vocabulary"), int_of(case, "count")
    n = _share(case["penalized"], rows)
    slots = n if case["slots"] == "as rows" else int_of(case, "slots")
    counts = rng.integers(0, most + 1, (max(slots, 1), vocabulary)).astype(np.int32)
    kinds = rng.integers(0, 3, vocabulary)
    counts[:, kinds == 0], counts[:, kinds == 1] = 0, most
    # Fewer slots than rows: several rows of a request, which follow its drafts.
    counts_rows = rng.permutation(np.arange(max(n, slots)) % max(slots, 1))[:n]
    drafts = [(row, at) for row in range(n) for at in range(rng.integers(0, int_of(case, "drafts") + 1))]
    drafted = rng.integers(0, vocabulary, len(drafts))
    match case["draft_ids"]:
        case "repeated":
            drafted[:] = rng.integers(0, vocabulary)
        case "counted":
            drafted[:] = np.flatnonzero(kinds == 1)[0] if (kinds == 1).any() else 0
        case "last":
            drafted[:] = vocabulary - 1
    columns = {name: _column({**case, "rows": n}, name, rng) for name in ("repetition", "presence", "frequency")}
    pairs = [(row, int(token)) for (row, _), token in zip(drafts, drafted, strict=True)]
    return penalty_input(counts, rows=rng.permutation(rows)[:n], counts_rows=counts_rows, drafts=pairs, **columns)


def check_penalize(ops: Ops, case: Case) -> None:
    """Compare all logits with numpy's."""
    logits, penalties, inputs = logits_of(case), penalty_input_of(case), Inputs(ops)
    found = ops.to_host(ops.penalize(ops.from_host(logits.copy()), inputs.of(penalties)))
    inputs.check_unchanged()
    assert_same(found, ORACLE.penalize(logits.copy(), penalties), "logits")


def _few_counts(case: Case) -> bool:
    slots = 300 if case["slots"] == 300 else int_of(case, "rows")
    return slots * int_of(case, "vocabulary") <= _MAX_LOGITS


PENALIZE: Final[Part[Ops]] = operation_part(
    "penalize", _PENALIZE, check_penalize, lambda case: _small(case) and _few_counts(case), _OF_LOGITS
)


# Masks ---------------------------------------------------------------------------------------------------------------

_MASK: Final = (
    Axis("rows", _ROWS, rare=(_BATCH,)),
    Axis("masked", ("all", "half", 1, 0)),
    Axis("vocabulary", _VOCABULARIES, rare=_EDGES),
    Axis("logits", _LOGITS),
    Axis("bits", ("random", "none", "all", "first", "last", "sign", "one each")),
    Axis("order", ("random", "ascending", "descending")),
    Axis("padding", ("random", "set", "unset")),
)
"""`padding` are the bits beyond the vocabulary."""


def check_mask(ops: Ops, case: Case) -> None:
    """Compare all logits with numpy's."""
    rng, rows, vocabulary = _random(case), int_of(case, "rows"), int_of(case, "vocabulary")
    n, words = _share(case["masked"], rows), -(-vocabulary // 32)
    allowed = rng.random((n, 32 * words)) < 0.5
    match case["bits"]:
        case "none" | "all":
            allowed[:] = case["bits"] == "all"
        case "sign":
            allowed[:] = np.arange(32 * words) % 32 == 31
        case "first" | "last" | "one each":
            allowed[:] = False
            chosen = {"first": 0, "last": vocabulary - 1}.get(str(case["bits"]), rng.integers(0, vocabulary, n))
            allowed[np.arange(n), chosen] = True
    if case["padding"] != "random":
        allowed[:, vocabulary:] = case["padding"] == "set"
    named = rng.permutation(rows)[:n].astype(np.int32)
    named = named if case["order"] == "random" else np.sort(named)[:: 1 if case["order"] == "ascending" else -1].copy()
    bits = np.packbits(allowed, axis=1, bitorder="little").view("<i4").astype(np.int32)
    logits, inputs = logits_of(case), Inputs(ops)
    found = ops.mask_logits(ops.from_host(logits.copy()), inputs("rows", named), inputs("bits", bits))
    inputs.check_unchanged()
    logits[named] = np.where(allowed[:, :vocabulary], logits[named], np.float32(-np.inf))
    assert_same(ops.to_host(found), logits, "logits")


MASK: Final[Part[Ops]] = operation_part("mask_logits", _MASK, check_mask, _small, _OF_LOGITS)


# Log-probabilities ---------------------------------------------------------------------------------------------------

_SCORES: Final = (
    Axis("rows", _ROWS, rare=(_BATCH,)),
    Axis("vocabulary", _VOCABULARIES, rare=_EDGES),
    Axis("logits", _LOGITS),
    Axis("tokens", ("random", "first", "last", "best", "worst")),
    Axis("top_n", (5, 0, 1, 2, 19, 20)),
)


def check_scores(ops: Ops, case: Case) -> None:
    """Compare log-probabilities and ranks of the healthy rows with numpy's."""
    logits, inputs, vocabulary = logits_of(case), Inputs(ops), int_of(case, "vocabulary")
    finite = np.isfinite(logits.max(axis=1))
    chosen: Mapping[str, Any] = {
        "first": 0,
        "last": vocabulary - 1,
        "best": logits.argmax(axis=1),
        "worst": logits.argmin(axis=1),
    }
    tokens = np.zeros(len(logits), np.int32)
    tokens[:] = chosen.get(str(case["tokens"]), _random(case).integers(0, vocabulary, len(logits)))
    top_n = min(int_of(case, "top_n"), vocabulary)
    device, ids = inputs("logits", logits), inputs("tokens", tokens)
    found = [
        np.asarray(each)[finite] for each in ops.fetch([*ops.logprobs(device, ids, top_n), ops.ranks(device, ids)])
    ]
    inputs.check_unchanged()
    healthy, asked = logits[finite], tokens[finite]
    own, top_ids, top = ORACLE.logprobs(healthy, asked, top_n)
    assert_same(found[1], top_ids, "ids of the most likely tokens")
    assert_same(found[3], ORACLE.ranks(healthy, asked), "ranks")
    for what, ours, right in (("token", found[0], own), ("most likely tokens", found[2], top)):
        assert ours.dtype == np.float32 and ours.shape == right.shape, f"{what}: {ours.dtype}{list(ours.shape)}"
        with np.errstate(invalid="ignore"):
            error = np.where(ours == right, 0.0, np.abs(ours.astype(np.float64) - right))
        limit = 2e-4 + 1e-5 * np.where(np.isfinite(right), np.abs(right), 0.0)
        wrong = np.argwhere(~(error <= limit))  # a NaN is wrong
        at = tuple(map(int, wrong[0])) if len(wrong) else ()
        assert not len(wrong), (
            f"log-probability of the {what}, row and column {at}: expected {right[at]}, got {ours[at]}"
        )


SCORES: Final[Part[Ops]] = operation_part("logprobs", _SCORES, check_scores, _small, _OF_LOGITS)


# Drafts --------------------------------------------------------------------------------------------------------------

_VERIFY: Final = (
    Axis("rows", (*_ROWS, 1025)),
    Axis("k", (3, 1, 2, *around(8, 16), 33)),
    Axis("token", (0, *around(2**15, 2**16), 131_072, 2**31 - 2)),
    Axis("right", ("some", "all", "none", "but the first", "but the last")),
    Axis("num_drafts", ("random", "all", "none")),
)


def check_verify(ops: Ops, case: Case) -> None:
    """Compare the number of accepted drafts with numpy's; drafts beyond the number of a row may be right as well."""
    rng, rows, k, inputs = _random(case), int_of(case, "rows"), int_of(case, "k"), Inputs(ops)
    sampled = (int_of(case, "token") + rng.integers(0, 2, (rows, 1 + k))).astype(np.int32)
    right = rng.random((rows, k)) < 0.8
    if case["right"] != "some":
        right[:] = case["right"] != "none"
    if "but" in str(case["right"]):
        right[:, 0 if case["right"] == "but the first" else -1] = False
    # A wrong draft differs in one bit, which is a high one in most rows.
    other = sampled[:, :k] ^ (1 << rng.choice([0, 8, 15, 16, 17, 24], (rows, 1)))
    drafts = np.where(right, sampled[:, :k], other).astype(np.int32)
    number = {"all": k, "none": 0}.get(str(case["num_drafts"]), rng.integers(0, k + 1, rows))
    num_drafts = np.broadcast_to(np.asarray(number, np.int32), (rows,)).copy()
    arrays = {"sampled": sampled, "drafts": drafts, "num_drafts": num_drafts}
    found = ops.to_host(ops.verify(*(inputs(name, array) for name, array in arrays.items())))
    inputs.check_unchanged()
    assert_same(np.asarray(found, np.int32), ORACLE.verify(sampled, drafts, num_drafts), "accepted drafts by row")


VERIFY: Final[Part[Ops]] = operation_part("verify", _VERIFY, check_verify)


# Cells and rows ------------------------------------------------------------------------------------------------------

_CELLS: Final = (
    Axis("array", ("counts", "logits", "activations")),
    Axis("rows", (*_ROWS, 1025), rare=({"rows": 129, "width": 151_936},)),
    Axis("width", _VOCABULARIES),
    Axis("base", (0, 255, 2**15, 2**16, 2**24, 2**30)),
    Axis("cells", (7, 0, 1, 255, 257, 6000, 70_000)),
    Axis("repeated", ("few", "one cell", "one row", "no cell", "corners")),
    Axis("written", ("half", "all", 1, 0)),
    Axis("gathered", ("repeated", "same", "reversed", "twice", 1, 0)),
)
"""`base` is the order of counts before additions."""


def check_cells(ops: Ops, case: Case) -> None:
    """Gather rows of an array, add to its cells, and overwrite rows, each as numpy does; then gather again.

    The gathered rows are a copy, which later changes of the array do not reach. `add_at` takes logits and counts,
    `write_rows` counts and activations.
    """
    rng, kind, inputs = _random(case), case["array"], Inputs(ops)
    rows, width = int_of(case, "rows"), int_of(case, "width")
    dtype = np.int32 if kind == "counts" else np.float32
    values = rng.integers(-99, 99, (rows, width))
    held = (int_of(case, "base") + values if kind == "counts" else values / 4).astype(dtype)
    x = activations(ops, held.astype(np.float32)) if kind == "activations" else ops.from_host(held.copy())

    def gather() -> None:
        picked = _picked(case, rng)
        found = ops.gather_rows(x, inputs("rows to gather", picked))
        copies.append((found, held[picked]))

    copies: list[tuple[Any, npt.NDArray[Any]]] = []
    gather()
    queued = (ops.fetch_later([x]), held.copy()) if ops.queues else None
    if kind != "activations":
        places = _places(case, rng)
        # Addends of logits need more bits than half precision has, but any order yields the same sums.
        most = 8 if kind == "counts" else 8191
        more = (rng.integers(-most, most + 1, len(places[0])) / (1 if kind == "counts" else 1024)).astype(dtype)
        if kind == "logits":
            more[1:2] = -np.inf
        x = ops.add_at(x, inputs("rows of cells", places[0]), inputs("ids of cells", places[1]), inputs("values", more))
        np.add.at(held, places, more)
    if kind != "logits":
        named = rng.permutation(rows)[: _share(case["written"], rows)].astype(np.int32)
        new = (rng.integers(-99, 99, (len(named), width)) / (1 if kind == "counts" else 4)).astype(dtype)
        device = activations(ops, new.astype(np.float32)) if kind == "activations" else inputs("rows' values", new)
        x = ops.write_rows(x, inputs("rows to write", named), device)
        held[named] = new
    gather()
    inputs.check_unchanged()
    for what, (found, right) in zip(
        ("rows gathered before changes", "rows gathered after changes"), copies, strict=True
    ):
        assert_same(np.asarray(ops.to_host(found), dtype), right, what)
    assert_same(np.asarray(ops.to_host(x), dtype), held, "the array after additions and writes")
    if queued is not None:
        assert_same(np.asarray(queued[0].wait()[0], dtype), queued[1], "a copy queued before changes")


def _places(case: Case, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Return rows and columns of cells."""
    rows, width, count = int_of(case, "rows"), int_of(case, "width"), int_of(case, "cells")
    match case["repeated"]:
        case "one cell":
            places = np.full(count, rows - 1), np.full(count, width - 1)
        case "one row":
            places = np.full(count, rows // 2), rng.integers(0, width, count)
        case "no cell":
            places = np.divmod(rng.permutation(rows * width)[:count], width)
        case "corners":
            places = rng.choice([0, rows - 1], count), rng.choice([0, width - 1], count)
        case _:
            places = rng.integers(0, rows, count), rng.integers(0, width, count)
    return places[0].astype(np.int32), places[1].astype(np.int32)


def _picked(case: Case, rng: np.random.Generator) -> IntArray:
    """Return the rows to gather."""
    rows = int_of(case, "rows")
    match case["gathered"]:
        case "same":
            picked = np.arange(rows)
        case "reversed":
            picked = np.arange(rows)[::-1]
        case "twice":
            picked = np.arange(2 * rows) % rows
        case "repeated":
            picked = rng.integers(0, rows, rows)
        case count:
            picked = rng.integers(0, rows, int(count or 0))
    return np.ascontiguousarray(picked, np.int32)


def _cells_fit(case: Case) -> bool:
    exact = case["array"] == "counts" or not case["base"]
    return exact and int_of(case, "rows") * int_of(case, "width") <= 2 * _MAX_LOGITS


CELLS: Final[Part[Ops]] = operation_part("cells", _CELLS, check_cells, _cells_fit)

PARTS: Final = (SAMPLE, PENALIZE, MASK, SCORES, VERIFY, CELLS)
"""In the order of the contract."""


def _random(case: Case) -> np.random.Generator:
    """Return a generator with a seed that depends on the sizes only, so that a reduced case has similar data."""
    return generator(int_of(case, "rows"), *(ord(letter) for letter in str(case.get("vocabulary"))))


def _share(value: Value, rows: int) -> int:
    """Return how many of the rows `all`, `half` or a number are."""
    return (
        {"all": rows, "half": -(-rows // 2)}.get(str(value), 0)
        if isinstance(value, str)
        else min(int(value or 0), rows)
    )


def _column(case: Case, name: str, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return one value for each row."""
    rows = int_of(case, "rows")
    values = next(axis.values for axis in (*_SAMPLE, *_PENALIZE) if axis.name == name)
    if case[name] == MIXED:
        return rng.choice(np.array([value for value in values if value != MIXED], np.float64), rows)
    given = np.full(rows, case[name], np.float64)
    return (
        given if case["spread"] == "all rows" else np.where(rng.random(rows) < 0.5, given, np.float64(values[0] or 0))
    )
