"""Limits of control groups v1 and v2, from files in the kernel's format."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fd_core.backends import contract, memory
from fd_core.backends.cpu import ReferenceBackend
from fd_core.config import EngineConfig

GIB = 2**30
UNLIMITED_V1 = "9223372036854771712"


@pytest.fixture
def read(tmp_path: Path):
    def limits(groups: str, files: dict[str, str]) -> tuple[int | None, int | None]:
        (tmp_path / "self").write_text(groups)
        for name, text in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        arguments = tmp_path / "self", tmp_path / "mount"
        return memory.memory_left(*arguments), memory.cpu_quota(*arguments)

    return limits


@pytest.mark.parametrize(
    ("groups", "files", "memory", "cpus"),
    [
        ("", {}, None, None),
        ("0::/\n", {"memory.max": "max", "memory.current": "5", "cpu.max": "max 100000"}, None, None),
        ("0::/\n", {"memory.max": "100", "memory.current": "30", "cpu.max": "150000 100000"}, 70, 2),
        ("0::/\n", {"memory.max": "100", "memory.current": "130", "cpu.max": "10000 100000"}, 0, 1),
        ("0::/\n", {"memory.max": "90", "memory.high": "50", "memory.current": "30"}, 20, None),
        ("0::/\n", {"memory.max": "90", "memory.current": "80", "memory.stat": "anon 20\ninactive_file 60"}, 70, None),
        ("0::/a/b\n", {"a/memory.max": "60", "a/memory.current": "40", "a/b/memory.max": "max"}, 20, None),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "400000 100000"}, None, 2),
        ("0::/../outside\n", {"memory.max": "9", "memory.current": "4"}, 5, None),
        ("0::/\n", {"memory.max": "a lot", "memory.current": "-", "cpu.max": "0 0"}, None, None),
    ],
)
def test_limits_of_cgroup_v2(read, groups: str, files: dict[str, str], memory: int | None, cpus: int | None) -> None:
    assert read(groups, files) == (memory, cpus)


@pytest.mark.parametrize("group", ["/docker/x", "/"])
def test_limits_of_cgroup_v1(read, group: str) -> None:
    """A container finds its group at the root, although /proc shows the name it has on the host."""
    files = {
        "memory/memory.limit_in_bytes": str(4 * GIB),
        "memory/memory.usage_in_bytes": str(3 * GIB),
        "memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}",
        "cpu/cpu.cfs_quota_us": "50000",
        "cpu/cpu.cfs_period_us": "100000",
    }
    assert read(f"4:memory:{group}\n2:cpu,cpuacct:{group}\n0::/\n", files) == (2 * GIB, 1)


def test_no_limits_of_cgroup_v1(read) -> None:
    files = {
        "memory/memory.limit_in_bytes": UNLIMITED_V1,
        "memory/memory.usage_in_bytes": str(GIB),
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
    }
    memory, cpus = read("4:memory:/\n1:cpu:/\n", files)
    assert memory is not None and memory > 2**60 and cpus is None


def test_cpu_quota_limits_threads_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(contract, "cpu_quota", lambda: 4)
    assert ReferenceBackend(EngineConfig(model="m")).threads == 4
    assert ReferenceBackend(EngineConfig(model="m", num_threads=9)).threads == 9
