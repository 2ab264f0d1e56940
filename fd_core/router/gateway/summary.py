"""The summary that `fdcore route` prints once it serves. No secrets: keys are counted, never shown."""

from __future__ import annotations

from typing import Final

from fd_core.router.config import RouterConfig
from fd_core.router.gateway.config import GatewayConfig
from fd_core.router.gateway.model_text import ModelText
from fd_core.router.workers import Role

__all__ = ["summary"]

_WORKERS: Final[dict[Role, str]] = {"mixed": "Workers", "prefill": "Prefill", "decode": "Decode"}


def summary(
    gateway: GatewayConfig, router: RouterConfig, url: str, text: ModelText | None, uses_prefix: bool
) -> list[tuple[str, str]]:
    """Return the lines of the summary as labels and values."""
    count = len(gateway.api_keys)
    clients = "without a key" if not count else "with the API key" if count == 1 else f"with one of {count} API keys"
    admin = f"at {gateway.admin_host} port {gateway.admin_port}, with the secret" if gateway.router_secret else "nobody"
    return [
        ("URL", f"{url}/v1"),
        ("Live page", url),
        *_workers(gateway),
        ("May register", admin),
        ("Policy", ", ".join(f"{router.policy_of(role)} for {role}" for role in gateway.roles)),
        ("Prompts", _prompts(text, uses_prefix)),
        ("Attempts", f"{router.max_attempts} workers or pairs, before the first byte"),
        (
            "Health checks",
            f"{router.health_check_endpoint} every {router.health_check_interval_secs:g} s, "
            f"{router.health_check_timeout_secs:g} s to answer",
        ),
        ("Clients", f"at {gateway.host}, {clients}"),
    ]


def _workers(gateway: GatewayConfig) -> list[tuple[str, str]]:
    given = [(_WORKERS[role], ", ".join(urls)) for role, urls in gateway.by_role.items() if urls]
    return given or [("Workers", "those that register")]


def _prompts(text: ModelText | None, uses_prefix: bool) -> str:
    if text is not None:
        return f"compared by the tokens of {text.name}"
    if uses_prefix:
        return "compared by their bytes until a worker says which model it serves, and that is on this machine"
    return "counted by their bytes; this policy does not compare them"
