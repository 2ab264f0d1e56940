"""The router's settings, frozen, and the keys of a settings file, which are those of FastDeploy's router."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

from fd_core.config import ListenConfig
from fd_core.config.constraints import CheckedStruct, Prefix, Range, make_settings
from fd_core.errors import ConfigError
from fd_core.router.workers import ROLES, Role

ALIASES: Final[Mapping[str, str]] = {
    "fd_metrics_score": "metrics_score",
    "fd_remote_metrics_score": "metrics_score",
    "remote_cache_aware": "cache_aware",
}
"""Names of policies in FastDeploy's settings files, and the names that they have here."""

_DAY: Final = 86400
SECTIONS: Final = ("scheduler", "manager")
"""Tables of a settings file that may contain the keys; keys may also be set outside of any table."""


class RouterConfig(CheckedStruct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """Settings for choosing workers and for giving up on one. In files the names have `-` instead of `_`."""

    policy: str = "request_num"
    """Policy that chooses among mixed workers."""
    prefill_policy: str = "process_tokens"
    """Policy that chooses among prefill workers."""
    decode_policy: str = "request_num"
    """Policy that chooses among decode workers."""
    eviction_interval_secs: Annotated[float, Range(0, math.inf, above=True)] = 60.0
    """Seconds between sweeps that free the memory of expired prefixes and sessions."""
    eviction_duration_mins: Annotated[float, Range(0, math.inf, above=True)] = 30.0
    """Minutes for which a served prefix, or an idle session, is remembered."""
    cache_block_size: Annotated[int, Range(1, 65536)] = 64
    """Tokens in a block of the prefix index."""
    max_index_blocks: Annotated[int, Range(1)] = 131_072
    """Blocks that the prefix index remembers for each worker."""
    max_sessions: Annotated[int, Range(1)] = 65_536
    """Sessions that the policy `session` remembers."""
    balance_abs_threshold: Annotated[float, Range(0, math.inf)] = 32.0
    """The policy `cache_aware` uses load alone where the requests of two workers differ by more than this number
    and by more than `balance_rel_threshold`."""
    balance_rel_threshold: Annotated[float, Range(0, math.inf)] = 0.5
    """Share of the requests of the most loaded worker, see `balance_abs_threshold`. FastDeploy's 1 and 0.2 leave few
    hits where a worker has several requests at a time."""
    hit_ratio_weight: Annotated[float, Range(0, math.inf)] = 1.0
    """Weight of the prompt tokens that a worker would have to compute, for the policy `cache_aware`."""
    load_balance_weight: Annotated[float, Range(0, math.inf)] = 1.0
    """Weight of the tokens that a worker must still compute for other requests, for the policy `cache_aware`."""
    waiting_weight: Annotated[float, Range(0, math.inf)] = 1.0
    """Weight of a request that waits for its first token, where a running one has 1, for the policy `metrics_score`."""
    prefix_hash_blocks: Annotated[int, Range(1)] = 1
    """Leading blocks of a prompt that the policy `prefix_hash` hashes."""
    prefix_hash_slack: Annotated[float, Range(0, math.inf)] = 0.25
    """Share by which the load of a worker may exceed the mean before the policy `prefix_hash` passes it over."""
    health_failure_threshold: Annotated[int, Range(1)] = 1
    """Health checks in a row that have to fail before a worker counts as unhealthy."""
    health_success_threshold: Annotated[int, Range(1)] = 1
    """Health checks in a row that have to pass before a worker counts as healthy."""
    health_check_timeout_secs: Annotated[float, Range(0, _DAY, above=True)] = 5.0
    """Seconds within which a worker has to answer a health check."""
    health_check_interval_secs: Annotated[float, Range(0, _DAY, above=True)] = 5.0
    """Seconds between two health checks of a worker."""
    health_check_endpoint: Annotated[str, Prefix("/")] = "/health"
    """Path of health checks."""
    circuit_failure_threshold: Annotated[int, Range(1)] = 3
    """Requests in a row that have to fail on a worker before its circuit breaker opens."""
    circuit_open_secs: Annotated[float, Range(0, math.inf, above=True)] = 1.0
    """Seconds for which a circuit breaker stays open at first; each further failure doubles them."""
    circuit_max_open_secs: Annotated[float, Range(0, math.inf, above=True)] = 30.0
    """Longest time in seconds for which a circuit breaker stays open."""
    max_attempts: Annotated[int, Range(1, 1000)] = 3
    """Attempts on different workers, or pairs, that one request gets."""
    max_requests_per_worker: Annotated[int, Range(0)] = 0
    """Requests in flight that one worker may have; 0 sets no bound."""

    def policy_of(self, role: Role) -> str:
        """Return the name of the policy that chooses among the workers of a role."""
        name = {"mixed": self.policy, "prefill": self.prefill_policy, "decode": self.decode_policy}[role]
        return ALIASES.get(name, name)

    @property
    def eviction_duration(self) -> float:
        """Seconds for which a served prefix, or an idle session, is remembered."""
        return self.eviction_duration_mins * 60.0


def router_config(settings: Mapping[str, Any]) -> RouterConfig:
    """Return the settings that a TOML or JSON file holds. Raises `ConfigError` that names the key and its range."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        table = value if key in SECTIONS else {key: value}
        if not isinstance(table, Mapping):
            raise ConfigError(f"{key} is {value!r:.60}; expected a table of settings", field=key)
        for name, setting in table.items():
            name = str(name).replace("-", "_")
            if name in flat:
                key = name.replace("_", "-")
                raise ConfigError(f"{key} is set twice", field=key, hint="remove one of them")
            flat[name] = setting
    return make_settings(RouterConfig, flat)


class GatewayConfig(ListenConfig, frozen=True, kw_only=True):
    """Settings of `fdcore route` in addition to the router's. Without API keys, the clients' are sent to workers."""

    workers: tuple[str, ...] = ()
    """Addresses of mixed workers."""
    prefill: tuple[str, ...] = ()
    """Addresses of prefill workers."""
    decode: tuple[str, ...] = ()
    """Addresses of decode workers."""
    transfer_secret_file: str | None = None
    """File with the secret that prefill and decode workers share with the router; None uses one in the cache folder."""
    worker_api_keys: tuple[str, ...] = ()
    """API keys of the workers; the first one is sent."""
    worker_ca_certs: str | None = None
    """Certificate authorities trusted for the certificates of workers; None uses those of the system."""
    tokenizer: str | None = None
    """Model whose tokenizer the workers use; None queries a worker for the model it serves."""
    admin_host: str = "127.0.0.1"
    admin_port: Annotated[int, Range(0, 65535)] = 8081
    router_secret: str = ""
    """Secret that workers have to send to register; if it is empty no worker can."""
    connect_seconds: Annotated[float, Range(0, _DAY, above=True)] = 3.0
    """Timeout for connecting to a worker, in seconds."""
    read_seconds: Annotated[float, Range(0, _DAY, above=True)] = 600.0
    """Seconds for which a worker may be silent within one request."""
    unreachable_seconds: Annotated[float, Range(0, _DAY, above=True)] = 20.0
    """Seconds for which a worker may be silent within an answer while no health check reaches it."""

    @property
    def by_role(self) -> dict[Role, tuple[str, ...]]:
        """Addresses of the workers in these settings, by role."""
        return {"mixed": self.workers, "prefill": self.prefill, "decode": self.decode}

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the workers in these settings; every role if workers may register."""
        return tuple(role for role in ROLES if self.router_secret or self.by_role[role])
