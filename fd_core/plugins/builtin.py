"""Connectors, router policies and scaling policies of the core, offered through the hooks of plugins."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_connectors() -> list[Entry]:
    """Offer `tcp`, `shared_memory` and `kv_store`."""
    module = "fd_core.disagg.connectors"
    about = "shared memory of both workers on one host"
    return [
        Entry("tcp", f"{module}.tcp:TCPConnector", "after the messages, on the same connection"),
        Entry("shared_memory", f"{module}.shared_memory:SharedMemoryConnector", about),
        Entry(
            "kv_store",
            f"{module}.kv_store:KVStoreConnector",
            "the KV store of --kv-store, which both workers use",
        ),
    ]


@hookimpl
def fd_register_router_policies() -> list[Entry]:
    """Offer policies that use load alone, and policies that use the request as well."""
    module = "fd_core.router.policies"
    return [
        Entry("random", f"{module}:Random", "any worker, each with the same chance"),
        Entry("round_robin", f"{module}:RoundRobin", "one worker after the other"),
        Entry("power_of_two", f"{module}:PowerOfTwo", "the less loaded of two random workers"),
        Entry("request_num", f"{module}:RequestNum", "the fewest requests"),
        Entry("process_tokens", f"{module}:ProcessTokens", "the fewest prompt tokens still to compute"),
        Entry("metrics_score", f"{module}:MetricsScore", "the fewest requests, waiting ones weighted"),
        Entry("cache_aware", f"{module}:CacheAware", "the longest cached prefix, weighed against load"),
        Entry("prefix_hash", f"{module}:PrefixHash", "consistent hashing of prefixes, bounded by load"),
        Entry("session", f"{module}:SessionAffinity", "the previous worker of the session"),
    ]


@hookimpl
def fd_register_scaling_policies() -> list[Entry]:
    """Offer `load`."""
    return [Entry("load", "fd_core.cluster.scaling:LoadPolicy", "queue, KV in use and time to the first token")]
