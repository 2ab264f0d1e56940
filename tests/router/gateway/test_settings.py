"""Flags, environment and files of `fdcore route`, and its start-up summary."""

from __future__ import annotations

from pathlib import Path

import pytest

from fd_core.cli.serving.route import summary
from fd_core.cli.settings.flags import GATEWAY_FLAGS, ROUTER_FLAGS
from fd_core.cli.settings.settings import merge_route
from fd_core.errors import ConfigError
from fd_core.router.config import GatewayConfig, RouterConfig
from fd_core.router.gateway.requests.forwarding import ticket_key
from fd_core.router.workers import ROLES
from fd_core.text.prompt_reader import find_text

WORKER = {"workers": ["http://127.0.0.1:1"]}

FASTDEPLOY = """
worker = ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
port = 9000

[scheduler]
policy = "remote_cache_aware"
cache-block-size = 32
hit-ratio-weight = 2

[manager]
health-check-endpoint = "/ready"
health-failure-threshold = 3
"""


def test_every_flag_sets_an_existing_field() -> None:
    assert {flag.field for flag in GATEWAY_FLAGS} <= set(GatewayConfig.__struct_fields__)
    assert {flag.field for flag in ROUTER_FLAGS} <= set(RouterConfig.__struct_fields__)


def test_fastdeploy_keys_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text(FASTDEPLOY)
    settings = merge_route({"config": str(path)}, {})
    assert settings.gateway.workers == ("http://127.0.0.1:8001", "http://127.0.0.1:8002")
    assert settings.gateway.port == 9000
    assert settings.router.policy_of("mixed") == "cache_aware"
    assert (settings.router.cache_block_size, settings.router.hit_ratio_weight) == (32, 2.0)
    assert (settings.router.health_check_endpoint, settings.router.health_failure_threshold) == ("/ready", 3)


def test_file_may_be_json_and_flags_override_it(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    path.write_text('{"workers": "http://127.0.0.1:1", "policy": "random", "max_attempts": 7}')
    settings = merge_route({"config": str(path), "policy": "session"}, {"FD_MAX_ATTEMPTS": "5"})
    assert (settings.router.policy, settings.router.max_attempts) == ("session", 5)
    assert settings.gateway.workers == ("http://127.0.0.1:1",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polcy = 'x'", "unknown setting 'polcy'"),
        ("policy = 3", "policy"),
        ("[scheduler]\ncache-block-size = 0", "between 1 and 65536"),
        ("prefill = ['http://x:1']", "a prefill worker needs a decode worker, and none is configured"),
        ("decodes = ['http://x:1']", "a decode worker needs a prefill worker, and none is configured"),
        ("prefill = 'http://x:1'\ndecode = 'http://x:1/'", "as a prefill worker and as a decode worker"),
        ("decode-workers = 'http://127.0.0.1:1'\nprefill = 'http://x:1'", "as a mixed worker and as a decode worker"),
        ("worker = 'a'\nworkers = 'b'", "duplicated"),
        ("port = 'x'", "port in"),
        ("=", "not valid TOML"),
    ],
)
def test_invalid_files_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "router.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        merge_route({"config": str(path), **WORKER}, {})
    assert caught.value.exit_code == 2


def test_pairs_are_read_from_flags_environment_and_files(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text("prefill-workers = ['http://p:1', 'http://p:2']\n[scheduler]\nprefill-policy = 'cache_aware'\n")
    settings = merge_route({"config": str(path), "decode_policy": "session"}, {"FD_DECODE": "http://d:1,http://d:2"})
    assert settings.gateway.by_role == {
        "mixed": (),
        "prefill": ("http://p:1", "http://p:2"),
        "decode": ("http://d:1", "http://d:2"),
    }
    assert settings.gateway.roles == ("prefill", "decode")
    assert [settings.router.policy_of(role) for role in ROLES] == ["request_num", "cache_aware", "session"]
    shown = dict(summary(settings.gateway, settings.router, "http://127.0.0.1:8000", None, True))
    assert shown["Prefill"] == "http://p:1, http://p:2" and "Workers" not in shown
    assert shown["Policy"] == "cache_aware for prefill, session for decode"


def test_half_a_pair_is_allowed_if_the_rest_may_register(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("long-enough-a-secret\n")
    settings = merge_route({"prefill": ["http://p:1"], "router_secret": str(path)}, {})
    assert settings.gateway.roles == ROLES


def test_transfer_secret_is_read_where_pairs_are_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ticket_key(GatewayConfig(workers=("http://a",))) is None
    own = ticket_key(GatewayConfig(prefill=("http://p",), decode=("http://d",)))
    assert own is not None and own == ticket_key(GatewayConfig(router_secret="s" * 16))
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    given = ticket_key(GatewayConfig(workers=("http://a",), transfer_secret_file=str(path)))
    assert given is not None and given != own
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="accessible to other users") as caught:
        ticket_key(GatewayConfig(transfer_secret_file=str(path)))
    assert caught.value.field == "--transfer-secret-file"
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    assert ticket_key(GatewayConfig(router_secret="s" * 16)) is None
    with pytest.raises(ConfigError, match="secret"):
        ticket_key(GatewayConfig(prefill=("http://p",)))


def test_secrets_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="at least 16"):
        merge_route({"router_secret": str(path)}, {})
    path.write_text("long-enough-a-secret\n")
    settings = merge_route({"router_secret": str(path), "api_keys": ["k"]}, {"FD_WORKER_KEY_FILE": str(path)})
    assert settings.gateway.router_secret == "long-enough-a-secret" == settings.gateway.worker_api_keys[0]
    shown = str(summary(settings.gateway, settings.router, "http://127.0.0.1:8000", None, True))
    assert "long-enough" not in shown and "registered ones" in shown and "'k'" not in shown


def test_summary_shows_how_prompts_are_compared() -> None:
    settings = merge_route(WORKER, {})
    rows = [
        dict(summary(settings.gateway, settings.router, "u", text, uses))["Prompts"]
        for text, uses in ((None, True), (None, False), (find_text("bytes", offline=True), True))
    ]
    assert "until a worker reports" in rows[0] and "counted" in rows[1] and "tokens of bytes" in rows[2]
