"""What each step did with each slot, as a matrix."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from fd_core.engine.tracing.format import DECODE, DRAINING, IDLE, LOADING, PREFILL
from fd_core.engine.tracing.reader import TraceContents

KINDS: Final = ("idle", "unscheduled", "prefill", "decode", "draining", "overrun", "loading")
"""What a step did with a slot. *unscheduled*: its request had no row in the step; *overrun*: computed for a request
that had ended by then, which a pipeline cannot avoid."""
_UNSCHEDULED, _PREFILL, _DECODE, _DRAINING, _OVERRUN, _LOADING = range(1, len(KINDS))


def kinds_of_cells(trace: TraceContents) -> npt.NDArray[np.uint8]:
    """Return uint8[slots, steps], indices into `KINDS`."""
    codes = {IDLE: 0, PREFILL: _PREFILL, DECODE: _DECODE, DRAINING: _DRAINING, LOADING: _LOADING}
    kinds = matrix_of_letters(trace, [position.line.slots for position in trace.positions], codes)
    depth = max(header.limits.pipeline_depth for header in trace.headers)
    starts = {(residency.slot, residency.start) for residency in trace.residencies}
    for residency in trace.residencies:
        begin, end = max(residency.start - trace.first, 0), residency.end - trace.first
        span = kinds[residency.slot, begin : end + 1]
        span[span == 0] = _UNSCHEDULED
        if residency.exit in ("open", "preempted", "unknown", "engine ended"):
            continue
        for at in range(end + 1, min(end + depth, kinds.shape[1])):
            if (residency.slot, at + trace.first) in starts:
                break
            if kinds[residency.slot, at] in (_PREFILL, _DECODE):
                kinds[residency.slot, at] = _OVERRUN
    return kinds


def matrix_of_letters(trace: TraceContents, texts: list[str], codes: dict[str, int]) -> npt.NDArray[np.uint8]:
    """Return uint8[slots, steps]: the code of each letter in the `texts` of the steps; 0 where a text has ended."""
    table = np.zeros(256, np.uint8)
    for letter, code in codes.items():
        table[ord(letter)] = code
    by_step = np.zeros((len(texts), trace.num_slots), np.uint8)
    for index, text in enumerate(texts):
        by_step[index, : len(text)] = np.frombuffer(text.encode("ascii"), np.uint8)
    return np.ascontiguousarray(table[by_step].T)
