"""A Ray cluster of several nodes on this machine, on the loopback alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

# Read when Ray is imported. The second keeps Ray from replacing the loopback by the machine's address.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# A lost node is detected after a second instead of half a minute.
os.environ |= {"RAY_health_check_period_ms": "300", "RAY_health_check_failure_threshold": "3"}
os.environ |= {"RAY_raylet_start_wait_time_s": "120"}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Three nodes of two processors each, started here or given."""
    from ray.cluster_utils import Cluster

    where = {"num_cpus": 2, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=where)
    os.environ["RAY_ADDRESS"] = cluster.address
    for _ in range(2):
        cluster.add_node(**where)
    yield cluster
    del os.environ["RAY_ADDRESS"]
    cluster.shutdown()
