"""Deployments on a multi-node Ray cluster on this machine; `nox -s ray` runs them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from fd_core.cluster.config import cluster_config
from fd_core.cluster.controller import ClusterNote
from fd_core.cluster.deployment import Deployment
from fd_core.launching.contract import NODE_LOST, how_ended
from fd_core.plugins import LAUNCHER, installed_plugins
from tests.cluster.test_deployment import SECONDS, Given, Traffic, asking, deployed, serves, table, until

pytestmark = pytest.mark.skipif(not os.environ.get("FD_RAY"), reason="takes a minute and Ray; `nox -s ray` runs it")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start four nodes of two processors each on the loopback interface."""
    # Read when Ray is imported: no statistics, plain loopback, and a lost node detected within seconds.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    os.environ |= {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "5"}
    os.environ |= {"RAY_raylet_start_wait_time_s": "120"}
    from ray.cluster_utils import Cluster

    where = {"num_cpus": 2, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args=where)
    os.environ["RAY_ADDRESS"] = started.address
    for _ in range(3):
        started.add_node(**where)
    yield started
    del os.environ["RAY_ADDRESS"]
    started.shutdown()


def test_pairs_with_two_routers_survive_node_loss(cluster: Any) -> None:
    async def scenario() -> None:
        notes: list[ClusterNote] = []
        file = table(prefill={"role": "prefill", "count": 2}, decode={"role": "decode", "count": 2})
        for group in file["workers"].values():
            group["cores"] = 1
        file["router"]["count"] = 2
        launcher = installed_plugins().load(LAUNCHER, "ray")()
        deployment = Deployment(cluster_config(file), launcher, {}, os.environ, notes.append)
        async with deployed(deployment, notes):
            assert len(deployment.urls) == 2
            routers = {each.node for each in deployment.ready("router")}
            held = {each.node for name in ("prefill", "decode") for each in deployment.ready(name)}
            victim = next(node for node in cluster.worker_nodes if node.node_id in held and {node.node_id} != routers)
            before = {each.name for each in deployment.held.values() if each.node == victim.node_id}
            url = next(each.url for each in deployment.ready("router") if each.name not in before)
            # Only requests on the lost node may break off: one of each of the four clients.
            async with asking(url, may_lose=4) as traffic:
                await answered(traffic, 8)
                cluster.remove_node(victim, allow_graceful=False)
                await until(lambda: not before & deployment.held.keys(), f"the loss of {before} is not seen")
                for group in ("router", "prefill", "decode"):
                    await until(lambda name=group: len(deployment.ready(name)) == 2, f"{group} does not recover")  # type: ignore[misc]
                await answered(traffic, 8)
            for url in deployment.urls:
                await until(lambda at=url: serves(at), f"{url} does not serve")  # type: ignore[misc]
                async with asking(url) as traffic:
                    await answered(traffic, 8)
            assert any(how_ended(NODE_LOST) in note.text for note in notes)

    asyncio.run(asyncio.wait_for(scenario(), 5 * SECONDS))


def test_multi_node_scaling_loses_no_request(cluster: Any) -> None:
    async def scenario() -> None:
        notes: list[ClusterNote] = []
        policy = Given()
        file = table(mixed={"min": 1, "max": 3})
        file["workers"]["mixed"]["cores"] = 1
        launcher = installed_plugins().load(LAUNCHER, "ray")()
        deployment = Deployment(cluster_config(file), launcher, {"mixed": policy}, os.environ, notes.append)
        async with deployed(deployment, notes), asking(deployment.urls[0]) as traffic:
            policy.wanted = 3
            await until(lambda: len(deployment.ready("mixed")) == 3, "it does not grow")
            assert len({each.node for each in deployment.ready("mixed")}) > 1
            await answered(traffic, 8)
            policy.wanted = 1
            await until(lambda: sum(each.group == "mixed" for each in deployment.held.values()) == 1, "nor shrink")
            await answered(traffic, 4)

    asyncio.run(asyncio.wait_for(scenario(), 5 * SECONDS))


async def answered(traffic: Traffic, more: int) -> None:
    """Wait until this many more requests were sent, each by a client whose previous one was answered."""
    before = traffic.requests
    await until(lambda: traffic.requests >= before + more, "nothing was served")
