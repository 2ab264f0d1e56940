"""Metrics are declared on fields and properties, found by type and read from values."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import msgspec

from fd_core.engine.process.messages import EngineStats
from fd_core.types import FinishReason
from fd_core.types.metrics import counter, declared_metrics, gauge, read_metrics, snapshot, state


class Inner(msgspec.Struct):
    by_reason: Annotated[dict[str, int], counter("refused", "Refused.", label="reason", values=("busy",))] = (
        msgspec.field(default_factory=Counter)
    )
    by_position: Annotated[tuple[int, ...], counter("kept", "Kept.", label="position")] = ()
    measured: Annotated[float | None, gauge("pace_seconds", "Pace.")] = None
    gate: Annotated[str, state("gate", "Gate.", label="state", values=("open", "shut"), labels={"side": "left"})] = (
        "open"
    )
    undeclared: int = 3

    @property
    def double(self) -> Annotated[int, gauge("double", "Double.")]:
        return 2 * self.undeclared


class Outer(msgspec.Struct):
    inner: Inner | None = None
    name: str | None = None
    named: Annotated[int, gauge("named", "Named.", only_with="name")] = 1


def read(stats: object) -> dict[str, dict[tuple[str, ...], float]]:
    return {spec.name: dict(samples) for spec, samples in read_metrics(stats)}


def test_declared_fields_and_properties_are_read() -> None:
    inner = Inner(by_position=(5, 2), measured=0.5)
    inner.by_reason["late"] += 4
    assert read(Outer(inner)) == {
        "refused": {("busy",): 0, ("late",): 4},
        "kept": {("0",): 5, ("1",): 2},
        "pace_seconds": {(): 0.5},
        "gate": {("left", "open"): 1, ("left", "shut"): 0},
        "double": {(): 6},
    }


def test_absent_values_have_no_samples() -> None:
    assert read(Outer()) == {}
    assert read(Outer(Inner(), name="a"))["named"] == {(): 1}
    assert read(Inner())["pace_seconds"] == {}, "nothing was measured"


def test_declarations_are_found_without_a_value() -> None:
    assert {spec.name for spec in declared_metrics(Outer)} == {
        "refused",
        "kept",
        "pace_seconds",
        "gate",
        "double",
        "named",
    }


def test_snapshot_is_independent_of_later_counts() -> None:
    inner = Inner()
    before = snapshot(inner)
    inner.by_reason["busy"] += 1
    inner.undeclared += 1
    assert (before.by_reason, before.undeclared) == ({}, 3)


def test_engine_stats_round_trip_through_msgpack() -> None:
    stats = EngineStats()
    stats.scheduler.outputs.finished[FinishReason.STOP] = 2
    stats.scheduler.counters.steps = 7
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats) == stats
