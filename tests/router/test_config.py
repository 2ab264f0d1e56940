"""The router's settings as given in files."""

from __future__ import annotations

import pytest

from fd_core.errors import ConfigError
from fd_core.router.config import RouterConfig, router_config


def test_fastdeploy_router_keys_are_accepted() -> None:
    config = router_config(
        {
            "scheduler": {
                "policy": "power_of_two",
                "prefill-policy": "remote_cache_aware",
                "decode-policy": "fd_metrics_score",
                "eviction-interval-secs": 30,
                "eviction-duration-mins": 10,
                "cache-block-size": 32,
                "balance-abs-threshold": 2,
                "balance-rel-threshold": 0.5,
                "hit-ratio-weight": 2,
                "load-balance-weight": 0.5,
                "waiting-weight": 3,
            },
            "manager": {
                "health-failure-threshold": 3,
                "health-success-threshold": 2,
                "health-check-timeout-secs": 1,
                "health-check-interval-secs": 2,
                "health-check-endpoint": "/ready",
            },
        }
    )
    assert [config.policy_of(role) for role in ("mixed", "prefill", "decode")] == [
        *("power_of_two", "cache_aware", "metrics_score")
    ]
    assert (config.eviction_duration, config.cache_block_size, config.balance_rel_threshold) == (600.0, 32, 0.5)
    assert (config.health_failure_threshold, config.health_check_endpoint) == (3, "/ready")


def test_defaults_match_fastdeploy_except_balance() -> None:
    assert router_config({}) == RouterConfig()
    assert router_config({"cache_block_size": 16}) == router_config({"cache-block-size": 16})
    config = RouterConfig()
    assert [config.policy_of(role) for role in ("mixed", "prefill", "decode")] == [
        *("request_num", "process_tokens", "request_num")
    ]
    assert (config.eviction_interval_secs, config.eviction_duration_mins, config.cache_block_size) == (60, 30, 64)
    assert (config.balance_abs_threshold, config.balance_rel_threshold) == (32, 0.5)
    assert (config.health_check_timeout_secs, config.health_check_interval_secs) == (5, 5)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"polcy": "random"}, "unknown setting 'polcy'"),
        ({"scheduler": 3}, "scheduler is 3; expected a table"),
        ({"policy": "random", "scheduler": {"policy": "session"}}, "policy is set twice"),
        ({"cache-block-size": "big"}, "cache-block-size"),
        ({"cache-block-size": 0}, "cache-block-size: 0 is out of range; expected between 1 and 65536"),
        ({"eviction-interval-secs": 0}, "eviction-interval-secs: 0 is out of range; expected above 0"),
        ({"hit-ratio-weight": -1}, "hit-ratio-weight: -1 is out of range; expected at least 0"),
        ({"hit-ratio-weight": float("nan")}, "hit-ratio-weight: expected a number, got nan"),
        ({"waiting-weight": float("inf")}, "waiting-weight: expected a number, got inf"),
        ({"health-check-endpoint": "health"}, "must begin with /"),
    ],
)
def test_invalid_setting_is_named(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        router_config(settings)
    assert words in str(caught.value) and caught.value.exit_code == 2
