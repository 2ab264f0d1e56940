"""The packs under test, and conversions that only tests need."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from fd_core.ops.contract import Ops, SampleInput, StepInput
from fd_core.ops.numpy_ops import NumpyOps
from fd_core.ops.torch_ops import TorchOps
from fd_core.types import RawTensor

PACKS = {"numpy": NumpyOps, "torch": TorchOps}


def on_device(ops: Ops, value: Any) -> Any:
    """Return a StepInput or SampleInput of numpy arrays with its arrays on the pack's device."""
    arrays = {
        each.name: ops.from_host(getattr(value, each.name))
        for each in fields(value)
        if isinstance(getattr(value, each.name), np.ndarray)
    }
    return replace(value, **arrays)


def raw(values: np.ndarray) -> RawTensor:
    return RawTensor("F32", values.astype(np.float32))


def sample_input(rows: int, **columns: Any) -> SampleInput:
    """Return parameters of `rows` rows; a column is a value for all or one for each."""
    defaults = {
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "seeds": (0, np.uint64),
        "positions": (0, np.int32),
    }
    arrays = {
        name: np.broadcast_to(np.asarray(columns.get(name, default), dtype), (rows,)).copy()
        for name, (default, dtype) in defaults.items()
    }
    filters = (arrays["top_k"] > 0) | (arrays["top_p"] < 1) | (arrays["min_p"] > 0)
    return SampleInput(**arrays, all_greedy=bool((arrays["temperature"] == 0).all()), any_filter=bool(filters.any()))


def step_input(rows: list[tuple[int, int]], block_size: int, tables: np.ndarray) -> StepInput:
    """Return the metadata of (tokens, context) rows over the given block tables."""
    counts, contexts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    query_start = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    row_of = np.repeat(np.arange(len(rows)), counts)
    positions = np.concatenate([np.arange(context - count, context) for count, context in rows]).astype(np.int32)
    slots = tables[row_of, positions // block_size] * block_size + positions % block_size
    return StepInput(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        kv_slots=slots.astype(np.int32),
        query_start=query_start,
        context_len=contexts,
        block_tables=tables,
        logits_rows=query_start[1:] - 1,
        max_query=int(counts.max()),
        max_context=int(contexts.max()),
    )
