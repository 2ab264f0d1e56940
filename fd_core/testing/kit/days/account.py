"""Accounts of days: what work costs users and host, compared with the same work of the core's plugin.

Other checks vary a value or two. A day has the numbers, lengths and habits of users together, at the sizes that servers
have, and everything that somebody would notice is compared: a fault needs no name to be found.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from typing import Final, NamedTuple

from fd_core.testing.kit.growth import traced
from fd_core.testing.kit.law import require
from fd_core.testing.kit.privacy import created_paths, kept_out_of_logs
from fd_core.testing.kit.processes import resource_snapshot

Day = Callable[[], Generator[None, None, Mapping[str, float]]]
"""Starts a day: yields after each hour, at least four times, closes what it opened, and returns figures by name.

A figure is something that users would notice, and less of it is better: tokens computed for each one delivered, the
longest pause of a text in steps, prompts that were computed again. The work is the same at each call.
"""
_BYTES: Final = 1 << 16
"""Bytes that one account of memory may exceed the other by, whatever the share."""


class DayAccount(NamedTuple):
    """Costs of a day."""

    figures: Mapping[str, float]
    peak: int
    """Most bytes of Python and numpy that it held at once."""
    grown: int
    """Bytes that it held at its end beyond those at noon."""
    left: Sequence[str]
    """Threads, descriptors and files that are still there after its end."""
    seconds: Sequence[float]
    """CPU time of each hour, of all threads."""


def account_of(day: Day, *secrets: bytes, memory: bool = True) -> DayAccount:
    """Live a day; fail if a log shows one of the secrets. Without `memory`, measure time undisturbed."""
    before, figures, held, seconds, peak = _open(), dict[str, float](), list[int](), list[float](), 0
    with kept_out_of_logs(*secrets), created_paths() as made:
        hours = day()
        with traced() if memory else nullcontext():
            while True:
                began = time.process_time()
                try:
                    next(hours)
                except StopIteration as end:
                    figures = dict(end.value)
                    break
                seconds.append(time.process_time() - began)
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
                peak = tracemalloc.get_traced_memory()[1]
    assert len(held) >= 4, f"a day of {len(held)} hours: noon cannot be told from its morning"
    del hours
    gc.collect()
    left = [*(_open() - before).elements(), *(f"{path}" for path in made if path.exists())]
    return DayAccount(figures, peak, held[-1] - held[len(held) // 2], left, seconds)


def worst_of(accounts: Sequence[DayAccount]) -> DayAccount:
    """Return the largest figures of the same day with several right plugins, any of which may be the measure."""
    figures = {name: max(each.figures[name] for each in accounts) for name in accounts[0].figures}
    peak, grown = (max(getattr(each, name) for each in accounts) for name in ("peak", "grown"))
    return DayAccount(figures, peak, grown, max((each.left for each in accounts), key=len), accounts[0].seconds)


def require_as_good(
    mine: DayAccount, core: DayAccount, what: str, rule: str, slack: Mapping[str, float] | float
) -> None:
    """Fail unless each figure, the memory and what is left are at most the core's, times `slack`.

    `slack` may be by figure, with those of `peak` and `grown`; the rest must not be worse at all.
    """
    allowed = slack if isinstance(slack, Mapping) else dict.fromkeys([*core.figures, "peak", "grown"], slack)
    assert mine.figures.keys() == core.figures.keys(), "two days that have other figures"
    for name, right in core.figures.items():
        got = mine.figures[name]
        require(
            got <= right * allowed.get(name, 1.0), rule, f"{what}: {name}: {got:,.4g}, with the core's {right:,.4g}"
        )
    for name, got, right in (("peak", mine.peak, core.peak), ("grown", mine.grown, max(core.grown, 0))):
        most = right * allowed.get(name, 1.0) + _BYTES
        said = {"peak": "bytes at most", "grown": "bytes more at its end than at noon"}[name]
        require(got <= most, rule, f"{what} holds {got:,} {said}, with the core's {right:,}")
    left = Counter(mine.left) - Counter(core.left)
    require(len(mine.left) <= len(core.left), rule, f"after {what}, these are left: {', '.join(left)}")


def _open() -> Counter[str]:
    """Return the threads and descriptors of this process by name."""
    found = resource_snapshot()
    return Counter([*found.descriptors, *(name.partition("-")[0] for name in found.threads)])
