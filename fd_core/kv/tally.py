"""Counters that several threads add to, and warnings that are logged once."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Final, TypeVar

__all__ = ["Tally"]

_log = logging.getLogger(__name__)

_MOST_LOGGED: Final = 64
"""Sentences: some come from another process."""

_Stats = TypeVar("_Stats")


class Tally:
    """The counters behind a struct of stats. Any thread adds, under a lock that is held for one addition."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._labelled: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._logged: set[str] = set()

    def add(self, name: str, count: float = 1) -> None:
        """Add to the counter that the struct calls `name`."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + count

    def add_labelled(self, name: str, label: str) -> None:
        """Add one to a label of the counters that the struct calls `name`."""
        with self._lock:
            self._labelled[name][label] += 1

    def log_once(self, sentence: str) -> None:
        """Log a warning, unless it was logged before or there were too many others."""
        with self._lock:
            if sentence in self._logged or len(self._logged) >= _MOST_LOGGED:
                return
            self._logged.add(sentence)
        _log.warning("%s", sentence)

    def read(self, stats: Callable[..., _Stats], **gauges: object) -> _Stats:
        """Return a struct of the counters and `gauges`; whatever was not counted is at its default."""
        with self._lock:
            labelled = {name: dict(counts) for name, counts in self._labelled.items()}
            return stats(**self._counts, **labelled, **gauges)
