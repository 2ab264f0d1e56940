"""`fdcore cluster`: a whole deployment from one file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fd_core.cli.report import interrupts_end_it, plain, reports_errors
from fd_core.errors import ConfigError, FdError

if TYPE_CHECKING:
    import socket

    from rich.console import Console

    from fd_core.cli.settings.flags import Flag
    from fd_core.cluster.config import ClusterConfig, RouterGroup, WorkerGroup
    from fd_core.cluster.deployment import Deployment
    from fd_core.cluster.page import DeploymentStatus


app = typer.Typer(no_args_is_help=True)

File = Annotated[Path, typer.Argument(metavar="FILE.toml", help="TOML file that describes the deployment.")]


@app.callback()
def cluster() -> None:
    """Serve a whole deployment from one file: routers and workers, restarted when they die, scaled by load."""


@app.command()
@reports_errors
def serve(
    file: File,
    check: Annotated[bool, typer.Option("--check", help="Only validate the file and its variables.")] = False,
) -> None:
    """Start the processes of FILE.toml, supervise them, and end them all on Ctrl-C.

    Routers and workers are processes of `fdcore route` and `fdcore serve`. Dead ones are restarted; groups with
    `min` and `max` grow and shrink with the load. Requests never pass through this command.
    """
    with interrupts_end_it():
        import asyncio

        from rich.console import Console

        from fd_core.cli.serving.serve import loop_factory
        from fd_core.cluster.config import ClusterSecrets, router_spec, worker_spec
        from fd_core.cluster.deployment import ClusterFailed, Deployment
        from fd_core.config.logs import configure_logs
        from fd_core.http.connections.listening import bind_socket
        from fd_core.plugins import LAUNCHER, SCALING_POLICY, installed_plugins

    config, variables = read_cluster_file(file), dict(os.environ)
    plugins = installed_plugins()
    policies = {
        name: plugins.load(SCALING_POLICY, group.policy)(group.scaling)
        for name, group in config.worker_groups.items()
        if group.max is not None
    }
    # Missing prerequisites of a process are reported before any is started.
    router_spec("router", config, 0, own=ClusterSecrets(), variables=variables)
    for name in config.worker_groups:
        worker_spec(name, config, name, own=ClusterSecrets(), variables=variables)
    launcher_class = plugins.load(LAUNCHER, config.launcher)
    if check:
        print(f"{file} is valid")
        return
    configure_logs("info", "text", access=False)
    console = Console(stderr=True)
    with bind_socket(config.host, config.port, flag="port", host_flag="host") as sock:
        deployment = Deployment(config, launcher_class(), policies, variables=variables)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(deployment, sock, console))
    if deployment.controller.failure:
        raise ClusterFailed(deployment.controller.failure, deployment.controller.exit_code)


@app.command()
@reports_errors
def status(file: File) -> None:
    """Show the processes of the deployment that `fdcore cluster serve FILE.toml` runs on this machine."""
    import urllib.error
    import urllib.request

    import msgspec

    from fd_core.cluster.page import DeploymentStatus
    from fd_core.http.connections.listening import ANY_ADDRESS

    config = read_cluster_file(file)
    host = "127.0.0.1" if config.host in ANY_ADDRESS else config.host
    url = f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}"
    try:
        with urllib.request.urlopen(f"{url}/status.json", timeout=10) as answer:  # noqa: S310  # http, as above
            shown = msgspec.json.decode(answer.read(), type=DeploymentStatus)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise FdError(
            f"no deployment responds at {url}: {error}", hint="check that `fdcore cluster serve` is running"
        ) from None
    for line in shown_status(shown):
        print(plain(line))


def read_cluster_file(file: Path) -> ClusterConfig:
    """Return the deployment of a file, with its settings checked. Raises `ConfigError` that names the field."""
    from fd_core.cli.settings.settings import read_table
    from fd_core.cluster.config import cluster_config

    try:
        config = cluster_config(read_table(file))
        _check_settings(config)
    except ConfigError as error:
        field = None if error.field == "--config" else error.field
        message = error.message.removeprefix("--config: ")
        named = f"{file}: {field}: {message}" if field else message
        raise ConfigError(named, field=field, hint=error.hint) from None
    return config


def _check_settings(config: ClusterConfig) -> None:
    from fd_core.cli.settings.flags import ENGINE_FLAGS, GATEWAY_FLAGS, ROUTER_FLAGS, SERVER_FLAGS
    from fd_core.cli.settings.settings import merge, merge_route

    given = _given(config.router_group, "router", (*GATEWAY_FLAGS, *ROUTER_FLAGS))
    with _named("router.settings"):
        merge_route({**given, "workers": ["http://127.0.0.1:1"]}, {})
    for name, group in config.worker_groups.items():
        given = _given(group, f"workers.{name}", (*ENGINE_FLAGS, *SERVER_FLAGS))
        with _named(f"workers.{name}.settings"):
            merge(config.model, {**given, "role": group.role}, {})


def _given(group: RouterGroup | WorkerGroup, where: str, flags: Sequence[Flag]) -> dict[str, Any]:
    from fd_core.cli.settings.settings import hint_for_key

    known = {flag.key: flag for flag in flags}
    for table, keys in (("settings", group.settings), ("secrets", group.secrets)):
        for key in keys:
            if key.replace("_", "-") not in known:
                hint = hint_for_key(key, flags)
                raise ConfigError(f"unknown setting {key!r}", field=f"{where}.{table}", hint=hint)
    return {known[key.replace("_", "-")].field: value for key, value in group.settings.items()}


@contextlib.contextmanager
def _named(field: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.message, field=field, hint=error.hint) from None


async def _serve(deployment: Deployment, sock: socket.socket, console: Console) -> None:
    import asyncio

    from fd_core.cli.serving.summary import show_summary
    from fd_core.cluster.page import DeploymentPage
    from fd_core.http.connections.listening import port_errors, signals_stop

    stop, hurry = asyncio.Event(), asyncio.Event()
    with port_errors(deployment.config.host, sock, "port"):
        page = DeploymentPage(deployment, time.monotonic, sock)
    try:
        with signals_stop(stop, hurry):
            title = "fdcore cluster"
            await deployment.run(stop, hurry, lambda: show_summary(console, _summary(deployment), title))
    finally:
        await page.close()


def _summary(deployment: Deployment) -> list[tuple[str, str]]:
    config = deployment.config
    return [
        *(("URL" if not number else "", f"{url}/v1") for number, url in enumerate(deployment.urls)),
        ("Model", config.model),
        ("Launcher", config.launcher),
        *((f"Workers {name}", _workers(group)) for name, group in config.worker_groups.items()),
        ("Status", f"http://{config.host}:{config.port}/status.json, or `fdcore cluster status`"),
    ]


def _workers(group: WorkerGroup) -> str:
    fewest, most = group.bounds
    if fewest == most:
        return f"{fewest} {group.role}"
    return f"{fewest} to {most} {group.role}, policy {group.policy}"


def shown_status(status: DeploymentStatus) -> Iterator[str]:
    """Yield the lines that describe a deployment to users."""
    yield f"{status.model}: {status.not_ready or 'ready'}"
    for name, group in status.groups.items():
        parts = [f"{group.ready} of {group.target} ready"]
        if group.role != "router":
            parts += [f"{group.running} running", f"{group.waiting} waiting", f"{group.kv_usage:.0%} of KV in use"]
        if group.ttft_seconds is not None:
            parts.append(f"p90 time to first token {group.ttft_seconds:g} s")
        if group.reason:
            parts.append(f"given up: {group.reason}")
        yield f"{name} ({group.role}): {', '.join(parts)}"
        for each in group.processes:
            yield f"  {each.name}  {each.phase} for {each.seconds:.0f} s  {each.url} {each.node}".rstrip()
