"""A bounded map whose entries expire."""

from __future__ import annotations

from fd_core.router.policies import Expiring


def test_entry_is_found_until_it_expires() -> None:
    entries: Expiring[str, int] = Expiring(duration=10.0, capacity=9)
    entries.put("a", 1, 0.0)
    assert entries.get("a", 9.9) == 1 and entries.has("a", 9.9)
    assert entries.get("a", 10.0) is None and not entries.has("a", 10.0)
    entries.put("a", 2, 9.0)
    assert entries.get("a", 18.9) == 2


def test_sweep_drops_expired_entries_only() -> None:
    entries: Expiring[str, int] = Expiring(duration=10.0, capacity=9)
    for time, key in enumerate("abc"):
        entries.put(key, time, float(time))
    entries.put("a", 3, 3.0)
    entries.sweep(12.0)
    assert len(entries) == 1 and entries.get("a", 12.0) == 3


def test_oldest_entry_is_evicted_first() -> None:
    entries: Expiring[str, int] = Expiring(duration=10.0, capacity=2)
    for key in "abac":
        entries.put(key, 0, 0.0)
    assert [key for key in "abc" if entries.has(key, 0.0)] == ["a", "c"]
