"""The router's settings, frozen, and the keys of a settings file, which are those of FastDeploy's router."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from fd_core.errors import ConfigError
from fd_core.router.workers import Role

__all__ = ["ALIASES", "SECTIONS", "RouterConfig", "router_config"]

ALIASES: Final[Mapping[str, str]] = {
    "fd_metrics_score": "metrics_score",
    "fd_remote_metrics_score": "metrics_score",
    "remote_cache_aware": "cache_aware",
}
"""Names of policies in FastDeploy's settings files, and the names that they have here."""

SECTIONS: Final = ("scheduler", "manager")
"""Tables of a settings file in which the keys may stand; keys may also stand outside of any table."""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """How the router chooses workers and when it gives up on one. In files the names have `-` instead of `_`."""

    policy: str = "request_num"
    """Policy that chooses among mixed workers."""
    prefill_policy: str = "process_tokens"
    """Policy that chooses among prefill workers."""
    decode_policy: str = "request_num"
    """Policy that chooses among decode workers."""
    eviction_interval_secs: float = 60.0
    """Seconds between sweeps that give back the memory of expired prefixes and sessions."""
    eviction_duration_mins: float = 30.0
    """Minutes for which a served prefix, or a session that sends nothing, is remembered."""
    cache_block_size: int = 64
    """Tokens in a block of the prefix index."""
    max_index_blocks: int = 131_072
    """Blocks that the prefix index remembers for each worker."""
    max_sessions: int = 65_536
    """Sessions that the policy `session` remembers."""
    balance_abs_threshold: float = 32.0
    """The policy `cache_aware` looks at load alone where the requests of two workers differ by more than this number
    and by more than `balance_rel_threshold`."""
    balance_rel_threshold: float = 0.5
    """Share of the requests of the most loaded worker, see `balance_abs_threshold`. FastDeploy's 1 and 0.2 leave few
    hits where a worker has several requests at a time."""
    hit_ratio_weight: float = 1.0
    """Weight of the prompt tokens that a worker would have to compute, for the policy `cache_aware`."""
    load_balance_weight: float = 1.0
    """Weight of what a worker still has to compute for other requests, for the policy `cache_aware`."""
    waiting_weight: float = 1.0
    """Weight of a request that waits for its first token, where a running one has 1, for the policy `metrics_score`."""
    prefix_hash_blocks: int = 1
    """Leading blocks of a prompt that the policy `prefix_hash` looks at."""
    prefix_hash_slack: float = 0.25
    """Share by which the load of a worker may exceed the mean before the policy `prefix_hash` passes it over."""
    health_failure_threshold: int = 1
    """Health checks in a row that have to fail before a worker counts as unhealthy."""
    health_success_threshold: int = 1
    """Health checks in a row that have to pass before a worker counts as healthy."""
    health_check_timeout_secs: float = 5.0
    """Seconds within which a worker has to answer a health check."""
    health_check_interval_secs: float = 5.0
    """Seconds between two health checks of a worker."""
    health_check_endpoint: str = "/health"
    """Path that health checks ask for."""
    circuit_failure_threshold: int = 3
    """Requests in a row that have to fail on a worker before its circuit breaker opens."""
    circuit_open_secs: float = 1.0
    """Seconds for which a circuit breaker stays open at first; each further failure doubles them."""
    circuit_max_open_secs: float = 30.0
    """Longest time in seconds for which a circuit breaker stays open."""
    max_attempts: int = 3
    """Attempts on different workers, or pairs, that one request gets."""
    max_requests_per_worker: int = 0
    """Requests in flight that one worker may have; 0 sets no bound."""

    def policy_of(self, role: Role) -> str:
        """Return the name of the policy that chooses among the workers of a role."""
        name = {"mixed": self.policy, "prefill": self.prefill_policy, "decode": self.decode_policy}[role]
        return ALIASES.get(name, name)

    @property
    def eviction_duration(self) -> float:
        """Seconds for which a served prefix, or a session that sends nothing, is remembered."""
        return self.eviction_duration_mins * 60.0


_RANGES: Final[tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...]] = (
    (
        "at least 1",
        lambda value: value >= 1,
        (
            *("cache_block_size", "max_index_blocks", "max_sessions", "prefix_hash_blocks", "max_attempts"),
            *("health_failure_threshold", "health_success_threshold", "circuit_failure_threshold"),
        ),
    ),
    (
        "more than 0",
        lambda value: 0 < value < math.inf,
        (
            *("eviction_interval_secs", "eviction_duration_mins", "circuit_open_secs", "circuit_max_open_secs"),
            *("health_check_timeout_secs", "health_check_interval_secs"),
        ),
    ),
    (
        "0 or more",
        lambda value: 0 <= value < math.inf,
        (
            *("balance_abs_threshold", "balance_rel_threshold", "hit_ratio_weight", "load_balance_weight"),
            *("waiting_weight", "prefix_hash_slack", "max_requests_per_worker"),
        ),
    ),
)
"""Ranges of settings: in words, as a test, and the settings that have to pass the test."""


def router_config(settings: Mapping[str, Any]) -> RouterConfig:
    """Return the settings that a TOML or JSON file holds. Raises `ConfigError` that names the key and its range."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        table = value if key in SECTIONS else {key: value}
        if not isinstance(table, Mapping):
            raise ConfigError(f"{key} is {value!r:.60}; it is a table of settings", field=key)
        for name, setting in table.items():
            name = str(name).replace("_", "-")
            if name in flat:
                raise ConfigError(f"{name} is set twice", field=name, hint="leave one of them out")
            flat[name] = setting
    known = {field.encode_name for field in msgspec.structs.fields(RouterConfig)}
    for name in flat:
        if name not in known:
            hint = f"there are: {', '.join(sorted(known))}"
            raise ConfigError(f"the router has no setting {name!r:.60}", field=name, hint=hint)
    try:
        config = msgspec.convert(flat, RouterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the router's settings cannot be used: {error}", hint="correct the type of that key"
        ) from error
    check(config)
    return config


def check(config: RouterConfig) -> None:
    """Raise `ConfigError` for a number out of its range; the error names the setting as files do."""
    for words, good, names in _RANGES:
        for name in names:
            value = getattr(config, name)
            if not good(value):
                key = name.replace("_", "-")
                raise ConfigError(f"{key} is {value}; it must be {words}", field=key)
    if not config.health_check_endpoint.startswith("/"):
        hint = "such as /health"
        raise ConfigError("health-check-endpoint must begin with /", field="health-check-endpoint", hint=hint)
