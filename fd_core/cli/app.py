"""The commands, assembled. A command is imported when it is invoked, and imports its dependencies when it runs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Annotated, Final

import typer

import fd_core

_COMMANDS: Final[Mapping[str, str]] = {
    "serve": "serving.serve:serve",
    "route": "serving.route:route",
    "cluster": "serving.cluster:app",
    "run-batch": "serving.run_batch:run_batch",
    "chat": "chats.chat:chat",
    "complete": "chats.chat:complete",
    "models": "models.models:app",
    "plugins": "plugins.plugins:app",
    "quantize": "models.models:quantize",
    "tokenize": "models.models:tokenize",
    "train-drafter": "models.train_drafter:train_drafter",
    "env": "env:env",
    "bench": "bench.commands:app",
    "calibrate": "planning.calibrate:calibrate",
    "trace": "trace_page.trace:trace",
    "simulate": "planning.simulate:simulate",
    "plan": "planning.plan:plan",
    "doctor": "plugins.conformance:doctor",
    "conformance": "plugins.conformance:conformance",
    "install": "plugins.plugins:install",
    "ps": "models.models:ps",
    "version": "app:version",
}
_ALIASES: Final[Mapping[str, str]] = {
    "run": "chats.chat:chat",
    "pull": "models.models:pull",
    "list": "models.models:list_",
    "collect-env": "env:env",
}
"""Names by which users of ollama and vLLM know a command."""


def assemble(only: str | None = None) -> typer.Typer:
    """Return the command line with every command, or only the command `only` if it exists, which starts faster."""
    app = typer.Typer(
        name="fdcore",
        help="Serve language models with plugins for hardware, scheduling and storage. Every command has --help.",
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        # For an option without a value typer imports pydantic, which takes longer than everything else.
        context_settings={
            "help_option_names": ["-h", "--help"],
            "default_map": {
                **dict.fromkeys(("help", "install_completion", "show_completion"), False),
                **{name: {"help": False} for name in (*_COMMANDS, *_ALIASES)},
            },
            "token_normalize_func": lambda name: name.replace("_", "-"),
        },
    )
    app.callback()(_common)
    commands = {**_COMMANDS, **_ALIASES}
    for name in (only,) if only and only in commands else commands:
        module, _, attribute = commands[name].partition(":")
        command = getattr(importlib.import_module(f"fd_core.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        elif hasattr(command, "__signature__"):
            from fd_core.cli.settings.help import SettingsCommand

            app.command(name, cls=SettingsCommand)(command)
        else:
            app.command(name)(command)
    return app


def __getattr__(name: str) -> typer.Typer:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return assemble()


def version() -> None:
    """Show the version."""
    print(f"fdcore {fd_core.__version__}")


def _show_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def _common(
    ctx: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", "-V", help="Show the version.", callback=_show_version)
    ] = False,
) -> None:
    """Accept the options before a command; without a command, suggest the next steps."""
    if ctx.invoked_subcommand is None:
        from fd_core.cli.chats.welcome import show_welcome

        show_welcome()
