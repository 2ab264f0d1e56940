"""`fdcore route`: one address in front of several servers."""

from __future__ import annotations

import asyncio
import importlib
import os
from functools import partial
from typing import TYPE_CHECKING

from fd_core.cli.flags import API_KEY_FILE, CONFIG_FILE, GATEWAY_FLAGS, ROUTER_FLAGS, Given, takes_flags
from fd_core.cli.report import interrupts_end_it, reports_errors

if TYPE_CHECKING:
    from rich.console import Console

    from fd_core.cli.router_settings import RouteSettings
    from fd_core.router.gateway.model_text import ModelText

__all__ = ["route"]


@reports_errors
@takes_flags(GATEWAY_FLAGS, ROUTER_FLAGS, (API_KEY_FILE, CONFIG_FILE))
def route(given: Given) -> None:
    """Serve several workers as one: requests go where they are computed soonest.

    Workers are named with --worker, or as pairs with --prefill and --decode, on the command line or in a file, or they
    register themselves: `fdcore serve MODEL --router URL`.
    The TOML or JSON file of --config takes every setting, by the names that FastDeploy's router uses too.
    """
    from fd_core.cli.router_settings import ROLE_FLAGS, merge_route

    settings = merge_route(given, os.environ)
    os.environ.pop("FD_API_KEY", None)

    with interrupts_end_it():
        import logging

        from rich.console import Console

        from fd_core.cli.serve import loop_factory
        from fd_core.errors import BadRequest, ConfigError
        from fd_core.plugins import ROUTER_POLICY, installed_plugins
        from fd_core.router.gateway.pairs import ticket_key
        from fd_core.router.router import Router
        from fd_core.server.listening import bind_socket

        importlib.import_module("fd_core.router.gateway.serving")

    gateway = settings.gateway
    logging.basicConfig(level=gateway.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
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
    with sock:
        if gateway.router_secret:
            admin_sock = bind_socket(
                gateway.admin_host, gateway.admin_port, flag="--admin-port", host_flag="--admin-host"
            )
        policies = [plugins.load(ROUTER_POLICY, settings.router.policy_of(role)) for role in gateway.roles]
        uses_prefix = any(policy.uses_prefix for policy in policies)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            from fd_core.router.gateway.serving import serve_gateway

            runner.run(
                serve_gateway(
                    gateway,
                    router,
                    text,
                    learns=uses_prefix,
                    ticket_key=key,
                    sock=sock,
                    admin_sock=admin_sock,
                    on_ready=lambda url: _show(console, settings, url, text, uses_prefix),
                )
            )


def _text(name: str | None, console: Console) -> ModelText | None:
    """Return tokenizer and chat template of the model that --tokenizer names, fetched if need be."""
    if name is None:
        return None
    from fd_core.cli.startup import startup_bars
    from fd_core.router.gateway.model_text import find_text

    with startup_bars(console) as bars:
        return find_text(name, offline=False, progress=bars)


def _show(console: Console, settings: RouteSettings, url: str, text: ModelText | None, uses_prefix: bool) -> None:
    from fd_core.cli.summary import show_summary
    from fd_core.router.gateway.summary import summary

    show_summary(console, summary(settings.gateway, settings.router, url, text, uses_prefix), title="fdcore routes")
