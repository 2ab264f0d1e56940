"""`fdcore route`: a load balancer for several workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from fd_core.cli.report import interrupts_end_it, outlive_hangups, reports_errors
from fd_core.cli.settings.flags import CONFIG_FILE, GATEWAY_FLAGS, ROUTER_FLAGS, Given, takes_flags

if TYPE_CHECKING:
    from rich.console import Console

    from fd_core.router.config import GatewayConfig, RouterConfig
    from fd_core.router.workers import Role
    from fd_core.text.prompt_reader import ModelText


_WORKERS: Final[Mapping[Role, str]] = {"mixed": "Workers", "prefill": "Prefill", "decode": "Decode"}


@reports_errors
@takes_flags(GATEWAY_FLAGS, ROUTER_FLAGS, (CONFIG_FILE,))
def route(given: Given) -> None:
    """Serve several workers as one: each request goes to the worker that will compute it soonest.

    Workers are listed with --worker, or as pairs with --prefill and --decode, on the command line or in a file, or they
    register themselves: `fdcore serve MODEL --router URL`. The TOML or JSON file of --config accepts every setting,
    also by the names of FastDeploy's router.
    """
    from fd_core.cli.settings.settings import ROLE_FLAGS, merge_route

    settings = merge_route(given, os.environ)
    outlive_hangups(settings.gateway.api_key_file)
    os.environ.pop("FD_API_KEY", None)

    with interrupts_end_it():
        import asyncio

        from rich.console import Console

        from fd_core.cli.serving.serve import loop_factory, opened_spans
        from fd_core.cli.serving.summary import show_summary
        from fd_core.config.logs import configure_logs
        from fd_core.errors import BadRequest, ConfigError
        from fd_core.http.connections.listening import bind_socket, raise_descriptor_limit, settle, url_of
        from fd_core.launching.announcing import announce
        from fd_core.plugins import ROUTER_POLICY, installed_plugins
        from fd_core.router.gateway.requests.forwarding import ticket_key
        from fd_core.router.gateway.serving import serve_gateway
        from fd_core.router.router import Router

    gateway = settings.gateway
    configure_logs(gateway.log_level, gateway.log_format, access=gateway.access_log)
    raise_descriptor_limit()
    plugins = installed_plugins()
    router = Router(settings.router, partial(plugins.load, ROUTER_POLICY))
    for role, urls in gateway.by_role.items():
        for url in urls:
            try:
                router.register(url, role, 0.0)
            except BadRequest as error:
                raise ConfigError(error.message, field=ROLE_FLAGS[role], hint=error.hint) from error
    key = ticket_key(gateway)
    console = Console(stderr=True)
    text = _text(gateway.tokenizer, console)
    sock = bind_socket(gateway.host, gateway.port)
    admin_sock = None
    with sock, contextlib.ExitStack() as stack:
        spans = opened_spans(gateway.otlp_traces_endpoint, "fdcore-route", stack)
        if gateway.router_secret:
            place = (gateway.admin_host, gateway.admin_port)
            admin_sock = bind_socket(*place, flag="--admin-port", host_flag="--admin-host")

        def ready(url: str) -> None:
            show_summary(console, summary(gateway, settings.router, url, text, uses_prefix), title="fdcore routes")
            settle()
            admin = [] if admin_sock is None else [url_of(gateway.admin_host, admin_sock)]
            announce(" ".join((url, *admin)))

        policies = [plugins.load(ROUTER_POLICY, settings.router.policy_of(role)) for role in gateway.roles]
        uses_prefix = any(policy.uses_prefix for policy in policies)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(
                serve_gateway(
                    gateway,
                    router,
                    text,
                    learns=uses_prefix,
                    ticket_key=key,
                    spans=spans,
                    sock=sock,
                    admin_sock=admin_sock,
                    on_ready=ready,
                )
            )


def _text(name: str | None, console: Console) -> ModelText | None:
    if name is None:
        return None
    from fd_core.cli.serving.startup import startup_bars
    from fd_core.text.prompt_reader import find_text

    with startup_bars(console) as bars:
        return find_text(name, offline=False, progress=bars)


def summary(
    gateway: GatewayConfig, router: RouterConfig, url: str, text: ModelText | None, uses_prefix: bool
) -> list[tuple[str, str]]:
    """Return the start-up summary, as labels and values. No secrets: keys are counted, never shown."""
    from fd_core.cli.serving.summary import clients

    admin = f"at {gateway.admin_host} port {gateway.admin_port}, with the secret" if gateway.router_secret else "none"
    workers = [(_WORKERS[role], ", ".join(urls)) for role, urls in gateway.by_role.items() if urls]
    interval, timeout = router.health_check_interval_secs, router.health_check_timeout_secs
    checks = f"{router.health_check_endpoint} every {interval:g} s, timeout {timeout:g} s"
    return [
        ("URL", f"{url}/v1"),
        ("Live page", url),
        *(workers or [("Workers", "registered ones")]),
        ("Registration", admin),
        ("Policy", ", ".join(f"{router.policy_of(role)} for {role}" for role in gateway.roles)),
        ("Prompts", _prompts(text, uses_prefix)),
        ("Attempts", f"{router.max_attempts} workers or pairs, before the first byte"),
        ("Health checks", checks),
        ("Clients", clients(gateway.host, gateway.api_keys, gateway.api_key_file)),
    ]


def _prompts(text: ModelText | None, uses_prefix: bool) -> str:
    if text is not None:
        return f"compared by the tokens of {text.name}"
    if uses_prefix:
        return "compared by their bytes until a worker reports its model, if its tokenizer is on this machine"
    return "counted by their bytes; this policy does not compare prompts"
