"""`fdcore plugins` and `fdcore install`: list plugins, diagnose them, create one, and install another one."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from fd_core.cli.plugins.scaffold import Framework, PluginKind
from fd_core.cli.report import plain, reports_errors
from fd_core.errors import ConfigError, PluginError

app = typer.Typer(invoke_without_command=True)

_DISTRIBUTION: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:==[A-Za-z0-9.!+]+)?")


@app.callback()
@reports_errors
def plugins(context: typer.Context) -> None:
    """List what plugins offer, diagnose one, or create one."""
    if context.invoked_subcommand is None:
        list_()


@app.command("list")
@reports_errors
def list_() -> None:
    """List what every plugin offers, and the plugins that cannot be used."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from fd_core.plugins import KINDS, installed_plugins

    plugins = installed_plugins()
    console = Console()
    table = Table("Kind", "Name", "From", "About")
    for kind in KINDS:
        for offer in plugins.offered(kind).values():
            table.add_row(kind.word, offer.name, escape(str(offer.origin)), escape(offer.entry.summary))
    console.print(table)
    for problem in plugins.problems:
        console.print(f"not usable: {problem}", style="red", markup=False, highlight=False)


@app.command()
@reports_errors
def check(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="An entry point, a distribution or a backend. [default: all]")
    ] = None,
) -> None:
    """Check installed plugins, and explain problems and remedies.

    Each is imported and probed in a separate process. Exits with code 4 if there is a problem.
    """
    from fd_core.cli.plugins.plugin_check import check_plugins

    checked = check_plugins(name)
    wrong = [paragraph for each in checked for paragraph in each.paragraphs()]
    for paragraph in wrong:
        print(f"{plain(paragraph)}\n")
    if wrong:
        raise typer.Exit(PluginError.exit_code)
    for each in checked:
        print(plain(f"{each.distribution} {each.version}: {', '.join(dict.fromkeys(each.seen.names))}"))
        for answer in each.seen.answers:
            print(f"  {plain(answer)}")
    print(f"{len(checked)} plugin{'' if len(checked) == 1 else 's'} checked, no problems found")


@app.command()
@reports_errors
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name by which users select it, the value of its flag.")],
    kind: Annotated[PluginKind, typer.Option("--kind", help="Kind of plugin.")],
    framework: Annotated[
        Framework | None,
        typer.Option("--framework", help="Framework whose operations a backend starts with. [default: numpy]"),
    ] = None,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="Folder of the project. [default: NAME]")
    ] = None,
) -> None:
    """Create a plugin project that passes its conformance kit as generated.

    A generated backend runs on the CPU. Nothing is overwritten.
    """
    from fd_core.cli.plugins.scaffold.project import write_project

    written, commands = write_project(name, kind, framework, folder=into)
    print(f"wrote {written}; next:", *commands, sep="\n  ")


@reports_errors
def install(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A plugin of fd_core, or any distribution.")],
) -> None:
    """Install a plugin into this environment.

    NAME is one of fd_core's plugins or any distribution on the package index. Afterwards the command shows what the
    plugin offers, and why a part of it cannot run here.
    """
    from fd_core.plugins import KNOWN_PLUGINS

    target = _requirement(name)
    if importlib.util.find_spec("pip") is None:
        raise PluginError(
            "this environment has no pip", hint=f"install {target} with the tool that created the environment"
        )
    ended = subprocess.run([sys.executable, "-m", "pip", "install", "--", target], check=False)
    if ended.returncode != 0:
        hint = None if name in KNOWN_PLUGINS else f"the plugins of fd_core are {', '.join(KNOWN_PLUGINS)}"
        raise PluginError(f"pip could not install {target}; see its output above", hint=hint)
    # This process has cached the environment from before the installation; a new one reads the current one.
    distribution = KNOWN_PLUGINS.get(name, name.partition("==")[0])
    check = [sys.executable, "-P", "-m", "fd_core.cli", "plugins", "check", distribution]
    checked = subprocess.run(check, check=False)
    if checked.returncode != 0:
        raise typer.Exit(checked.returncode)


def _requirement(name: str) -> str:
    """Return pip's requirement: a plugin of this checkout or a distribution; `ConfigError` for options and paths."""
    from fd_core.plugins import KNOWN_PLUGINS

    if name in KNOWN_PLUGINS:
        folder = Path(__file__).parents[3] / "plugins" / name
        if not (folder / "pyproject.toml").is_file():
            # The index might serve a distribution of that name by an unknown publisher.
            raise ConfigError(f"the plugin {name} is not part of this version", field="NAME")
        return str(folder)
    if not _DISTRIBUTION.fullmatch(name):
        hint = f"use one of {', '.join(KNOWN_PLUGINS)}, or a name such as fd-mychip or fd-mychip==1.2"
        raise ConfigError(f"{name!r} is not a valid distribution name", field="NAME", hint=hint)
    return name
