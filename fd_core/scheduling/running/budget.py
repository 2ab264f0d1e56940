"""The step token budget: what each row is charged, and who yields when it is tight.

The charge is per request and exact: a prefill chunk, or one token plus the row's real drafts. Drafts are the first to
shrink; a decode is left out only in rotation, the longest waiting first in.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fd_core.scheduling.running.plan import Budget
from fd_core.types import IntArray


def allot_decodes(
    budget: Budget, drafts: IntArray, last_step: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.intp], IntArray]:
    """Charge decoding rows and return (indices of the rows that run, drafts granted to each of them).

    `drafts` int32[n] is what each row would like, `last_step` int64[n] when it last ran. If not every row fits, those
    that waited longest run, without drafts; among equals the turn goes round, so that all run equally often. Otherwise
    every row runs and what is left goes to drafts, dealt evenly: a row keeps its drafts or gets the common cap,
    whichever is smaller, and the remainder goes to the earlier rows.
    """
    count = len(drafts)
    if count >= budget.left:
        first = (int(last_step.max(initial=-1)) + 1) * budget.left
        order = np.lexsort(((np.arange(count) - first) % max(count, 1), last_step))[: budget.left]
        chosen = np.sort(order)
        budget.take(len(chosen))
        return chosen, np.zeros(len(chosen), np.int32)
    budget.take(count)
    rows = np.arange(count)
    if not np.count_nonzero(drafts):
        return rows, drafts
    granted = deal(drafts, budget.left)
    budget.take(int(granted.sum()))
    return rows, granted


def deal(wanted: IntArray, tokens: int) -> IntArray:
    """Return the fairest int32[n], nowhere above `wanted`, whose sum is at most `tokens`."""
    if int(wanted.sum()) <= tokens:
        return wanted
    cap = int(wanted.max())
    while int(np.minimum(wanted, cap).sum()) > tokens:
        cap -= 1
    granted = np.minimum(wanted, cap)
    spare = tokens - int(granted.sum())
    more = np.flatnonzero(wanted > cap)[:spare]
    granted[more] += 1
    return granted.astype(np.int32)
