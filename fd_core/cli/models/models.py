"""`fdcore models`: which models can be named, and fetching them ahead of time."""

from __future__ import annotations

from typing import Annotated

import typer

from fd_core.cli.report import reports_errors

app = typer.Typer(no_args_is_help=True, help="List models, or fetch them ahead of time.")


@app.command("list")
@reports_errors
def list_() -> None:
    """Show the models with a short name and those that are cached here."""
    from rich.console import Console
    from rich.table import Column, Table

    from fd_core.models.catalog import list_models

    table = Table(Column("Model", overflow="fold"), "About", "Size", "Here")
    for model in list_models():
        size = f"{model.size / 1e6:,.0f} MB"
        table.add_row(model.name, model.about, size, "no" if model.path is None else "yes")
    console = Console()
    console.print(table)
    console.print("A folder with safetensors, a .gguf file or a Hugging Face name can be served as well.")


@app.command()
@reports_errors
def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="smollm2 or a Hugging Face name.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face model.")] = None,
) -> None:
    """Fetch MODEL into the cache and check it."""
    from rich.console import Console

    from fd_core.cli.serving.startup import startup_bars
    from fd_core.models.catalog import resolve_model

    with startup_bars(Console(stderr=True)) as bars:
        found = resolve_model(model, revision=revision, progress=bars)
    print(found.path)
