"""The commands, assembled. Nothing heavy is imported here: each command imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

import fd_core
from fd_core.cli import env
from fd_core.cli.bench import commands as bench
from fd_core.cli.chats import chat
from fd_core.cli.models import models, quantize, tokenize
from fd_core.cli.planning import calibrate, plan, simulate
from fd_core.cli.plugins import conformance, doctor, plugins
from fd_core.cli.serving import cluster, route, run_batch, serve
from fd_core.cli.settings.foreign_flags import ServingCommand
from fd_core.cli.trace_page import trace

app = typer.Typer(
    name="fdcore",
    help="Serve language models with plugins for hardware, scheduling and storage. Every command has --help.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=ServingCommand)(serve.serve)
app.command(cls=ServingCommand)(route.route)
app.add_typer(cluster.app, name="cluster")
app.command()(run_batch.run_batch)
app.command()(chat.chat)
app.command()(chat.complete)
app.add_typer(models.app, name="models")
app.add_typer(plugins.app, name="plugins")
app.command()(quantize.quantize)
app.command()(tokenize.tokenize)
app.command()(env.env)
app.command("collect-env", help="Another name of `fdcore env`.")(env.env)
app.add_typer(bench.app, name="bench")
app.command()(calibrate.calibrate)
app.command()(trace.trace)
app.command()(simulate.simulate)
app.command()(plan.plan)
app.command()(doctor.doctor)
app.command()(conformance.conformance)
app.command()(plugins.install)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fdcore {fd_core.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.", callback=_show_version)] = False,
) -> None:
    """Hold the options that come before a command; without one, say what to type next."""
    if ctx.invoked_subcommand is None:
        from fd_core.cli.chats.welcome import show_welcome

        show_welcome()
