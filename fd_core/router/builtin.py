"""The router policies that come with the core, offered through the same hook as those of plugins."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_router_policies() -> list[Entry]:
    """Offer policies that look at load alone, and policies that look at the request as well."""
    return [
        Entry("random", "fd_core.router.policies:Random", "any worker, each with the same chance"),
        Entry("round_robin", "fd_core.router.policies:RoundRobin", "one worker after the other"),
        Entry("power_of_two", "fd_core.router.policies:PowerOfTwo", "the less loaded of two random workers"),
        Entry("request_num", "fd_core.router.policies:RequestNum", "the fewest requests"),
        Entry("process_tokens", "fd_core.router.policies:ProcessTokens", "the fewest prompt tokens still to compute"),
        Entry(
            "metrics_score", "fd_core.router.policies:MetricsScore", "the fewest running and weighed waiting requests"
        ),
        Entry("cache_aware", "fd_core.router.policies:CacheAware", "the longest cached prefix, weighed against load"),
        Entry("prefix_hash", "fd_core.router.policies:PrefixHash", "consistent hashing of prefixes, bounded by load"),
        Entry("session", "fd_core.router.policies:SessionAffinity", "the worker that the session had before"),
    ]
