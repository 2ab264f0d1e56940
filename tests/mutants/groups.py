"""Groups of test files that judge a mutant; pytest runs each group as one process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.mutants.mutant import Mutant

__all__ = [
    "LEFT_OUT",
    "LONG",
    "ROOT",
    "Group",
    "groups",
    "in_order",
    "killer_group",
    "known_killers",
    "remember_killers",
]

ROOT = Path(__file__).parents[2]

_FOLDERS: dict[str, tuple[str, ...]] = {
    "core": ("tests/test_signals.py", "tests/test_config.py"),
    "kv": ("tests/kv",),
    "scheduling": ("tests/scheduling",),
    "runner": ("tests/runner",),
    "structured": ("tests/structured",),
    "parsing": ("tests/text/parsing",),
    "cluster": ("tests/cluster/test_controller.py", "tests/cluster/test_scaling.py"),
    "router": ("tests/router",),
    "disagg": ("tests/disagg",),
    "engine": ("tests/engine",),
}

_CONNECTORS = "tests/disagg/connectors/"
"""Excluded: they wait for processes and sockets."""

LONG = (
    "tests/disagg/test_lease_machine.py",
    "tests/engine/test_abort.py",
    "tests/engine/test_draft_model.py",
    "tests/engine/test_engine_machine.py",
    "tests/engine/test_golden_stream.py",
    "tests/engine/test_pairs_machine.py",
    "tests/engine/test_speculation.py",
    "tests/kv/tiers/test_threads.py",
)
"""Slow files: a separate group, so that fast tests of other folders run first."""

LEFT_OUT = (
    "tests/disagg/test_faults.py",
    "tests/disagg/test_pair.py",
    "tests/engine/clients/test_process.py",
    "tests/engine/test_restarts.py",
    "tests/router/gateway/test_disconnects.py",
    "tests/router/gateway/requests/test_forwarding.py",
    "tests/router/gateway/workers/test_kv_events.py",
    "tests/router/gateway/test_processes.py",
)
"""Files that wait for processes, sockets and the clock; they cover nothing of the protocol's core."""


@dataclass(frozen=True, slots=True)
class Group:
    """Test files, relative to the root of the repository, that run in one process and in this order."""

    name: str
    files: tuple[str, ...]


def groups() -> tuple[Group, ...]:
    """Return every group, with the slow files last and in separate groups."""
    found = []
    for name, paths in _FOLDERS.items():
        files: dict[str, None] = {}
        for relative in paths:
            path = ROOT / relative
            tests = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
            files.update(dict.fromkeys(test.relative_to(ROOT).as_posix() for test in tests))
        found.append(Group(name, tuple(file for file in files if not file.startswith((*LONG, *LEFT_OUT, _CONNECTORS)))))
    return *found, Group("long", LONG)


def in_order(found: tuple[Group, ...], mutant: Mutant, seconds: Mapping[str, float]) -> tuple[Group, ...]:
    """Return the groups in the order in which they judge `mutant`: those of the mutant's folder first, then by cost.

    `seconds` holds the duration of each group without a mutant, by name.
    """
    folders = {Path("tests", edit.file).parent for edit in mutant.edits}

    def mirrors(group: Group) -> bool:
        return group.name != "long" and any(Path(file).parent in folders for file in group.files)

    return tuple(sorted(found, key=lambda group: (not mirrors(group), seconds[group.name])))


_KILLERS = Path(__file__).with_name("killers.json")
"""Tests that killed each mutant in its last judgement, by mutant. The file only saves time: a mutant that its killer
misses is judged by every group."""


def known_killers() -> dict[str, str]:
    """Return the test that killed each mutant in its last judgement, by the mutant's name."""
    return msgspec.json.decode(_KILLERS.read_bytes(), type=dict[str, str])


def remember_killers(killers: Mapping[str, str], mutants: Collection[str]) -> None:
    """Add the killers of these mutants to the file, and remove mutants that are not among `mutants`."""
    merged = {name: test for name, test in (known_killers() | dict(killers)).items() if name in mutants}
    _KILLERS.write_bytes(msgspec.json.format(msgspec.json.encode(dict(sorted(merged.items())))) + b"\n")


def killer_group(killer: str | None, ordered: tuple[Group, ...], passed: Mapping[str, Collection[str]]) -> Group | None:
    """Return the group that holds only `killer`, or None if no such test is among those that `passed` names.

    `passed` holds the passing tests of each group without a mutant, by group name.
    """
    if killer is None:
        return None
    return next((Group(group.name, (killer,)) for group in ordered if killer in passed[group.name]), None)
