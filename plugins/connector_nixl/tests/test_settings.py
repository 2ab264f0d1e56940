"""Settings from environment variables."""

from __future__ import annotations

import pytest
from fd_core.errors import ConfigError

from fd_connector_nixl.settings import read_settings

TRUST = {"FD_NIXL_TRUST_NETWORK": "yes"}


def test_default_device_is_the_loopback() -> None:
    assert read_settings(TRUST).engine_config == "TLS=tcp,NET_DEVICES=lo"


@pytest.mark.parametrize("environment", [{}, {"FD_NIXL_TRUST_NETWORK": ""}, {"FD_NIXL_TRUST_NETWORK": "no"}])
def test_nothing_listens_without_consent(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="every peer that connects") as caught:
        read_settings(environment)
    assert caught.value.field == "FD_NIXL_TRUST_NETWORK"


def test_other_devices_are_the_users_choice() -> None:
    chosen = {"FD_NIXL_TLS": "rc", "FD_NIXL_NET_DEVICES": "mlx5_0:1", "FD_NIXL_MEMORY_MB": "8"}
    settings = read_settings(TRUST | chosen)
    assert settings.engine_config == "TLS=rc,NET_DEVICES=mlx5_0:1"
    assert settings.memory == 8 << 20


@pytest.mark.parametrize(("name", "value"), [("UCX_TLS", "all"), ("UCX_NET_DEVICES", "eth0"), ("UCX_NET_DEVICES", "")])
def test_overriding_variables_are_rejected_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is set") as caught:
        read_settings(TRUST | {name: value})
    assert caught.value.field == name
    assert caught.value.exit_code == 2


def test_device_list_must_be_set_for_both() -> None:
    with pytest.raises(ConfigError, match="UCX_NET_DEVICES=lo,eth0"):
        read_settings(TRUST | {"FD_NIXL_NET_DEVICES": "lo,eth0"})
    settings = read_settings(TRUST | {"FD_NIXL_NET_DEVICES": "lo,eth0", "UCX_NET_DEVICES": "lo,eth0"})
    assert settings.engine_config == "TLS=tcp"


@pytest.mark.parametrize("value", ["", "lo,", "lo,TLS=all", "lo eth0", "lo\n"])
def test_invalid_device_list_is_rejected(value: str) -> None:
    with pytest.raises(ConfigError, match="FD_NIXL_NET_DEVICES"):
        read_settings(TRUST | {"FD_NIXL_NET_DEVICES": value})


@pytest.mark.parametrize("value", ["", "0", "-1", "4096.5", "many", "9" * 5000])
def test_invalid_amount_of_memory_is_rejected(value: str) -> None:
    with pytest.raises(ConfigError, match="FD_NIXL_MEMORY_MB"):
        read_settings(TRUST | {"FD_NIXL_MEMORY_MB": value})
