"""Devices and memory of a backend, checked on right and wrong backends without the rest of the kit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fd_core.backends.cpu import CpuBackend, ReferenceBackend
from fd_core.config import EngineConfig
from fd_core.testing.suite.scale.test_memory import test_free_memory_respects_the_limit_of_the_container as check_memory
from fd_core.testing.suite.test_lifetime import test_engines_share_no_device as check_engines
from tests.testing.wrong import computing
from tests.testing.wrong.fault import FAULTS

assert computing
HOST = FAULTS["wrong_counts_the_memory_of_the_host"].backend


@pytest.mark.parametrize("backend", [CpuBackend, ReferenceBackend])
def test_core_backends_assign_separate_cores_within_the_container(backend, tmp_path):
    check_engines(SimpleNamespace(cls=backend))
    check_memory(SimpleNamespace(backend=backend(EngineConfig(model="kit"))), tmp_path)


def test_memory_beyond_the_limit_of_the_container_is_found(tmp_path):
    with pytest.raises(AssertionError, match="in a container with 96 MiB left"):
        check_memory(SimpleNamespace(backend=HOST(EngineConfig(model="kit"))), tmp_path)
