"""Devices, memory and counts of a backend, checked on right and wrong backends without the rest of the kit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fd_core.backends.cpu import CpuBackend, ReferenceBackend
from fd_core.config import EngineConfig
from fd_core.testing.suite.scale.test_counters import test_attention_is_right_at_any_number_of_steps as check_counts
from fd_core.testing.suite.scale.test_memory import test_free_memory_respects_the_limit_of_the_container as check_memory
from fd_core.testing.suite.test_lifetime import test_engines_share_no_device as check_engines
from tests.testing.wrong import computing
from tests.testing.wrong.fault import FAULTS

assert computing
AGAIN, HOST = (FAULTS[f"wrong_{name}"].backend for name in ("assigns_cores_again", "counts_the_memory_of_the_host"))


@pytest.mark.parametrize("backend", [CpuBackend, ReferenceBackend])
def test_core_backends_assign_separate_cores_within_the_container(backend, tmp_path):
    check_engines(SimpleNamespace(cls=backend))
    check_memory(SimpleNamespace(backend=backend(EngineConfig(model="kit"))), tmp_path)


def test_cores_assigned_to_two_engines_are_found():
    with pytest.raises(AssertionError, match="processes share a device"):
        check_engines(SimpleNamespace(cls=AGAIN))


def test_memory_beyond_the_limit_of_the_container_is_found(tmp_path):
    with pytest.raises(AssertionError, match="in a container with 96 MiB left"):
        check_memory(SimpleNamespace(backend=HOST(EngineConfig(model="kit"))), tmp_path)


@pytest.mark.parametrize("backend", [CpuBackend, ReferenceBackend])
def test_core_packs_count_any_number_of_steps(backend):
    check_counts(_target_of(backend), _needs_nothing)


def test_steps_numbered_in_float32_are_found():
    with pytest.raises(AssertionError, match="after about 16,777,216 steps"):
        check_counts(_target_of(FAULTS["wrong_numbers_steps_in_float32"].backend), _needs_nothing)


def _target_of(backend):
    config = EngineConfig(model="kit", num_threads=1)
    return SimpleNamespace(backend=backend(config), config=lambda: config)


def _needs_nothing(*abilities):
    pass
