"""`fdcore tokenize`: a text as the tokens of a model, without loading the model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fd_core.cli.report import reports_errors


@reports_errors
def tokenize(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", show_default=False, help="The text; without it, what comes in.")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A model's name, folder or .gguf file; `bytes` for the null backend.")
    ] = "smollm2",
    chat: Annotated[
        bool, typer.Option("--chat", help="Read the text as a user's message, in the model's chat template.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Write the ids alone, on one line.")] = False,
    special: Annotated[
        bool, typer.Option(help="Add what the model wants around a text, such as BOS; a chat template does it itself.")
    ] = True,
) -> None:
    """Show the tokens of TEXT, one a line: id and what it stands for. The number of tokens goes to standard error."""
    from rich.console import Console

    from fd_core.cli.serving.startup import startup_bars
    from fd_core.text.prompt_reader import PromptReader, find_text

    given = sys.stdin.read() if text is None else text
    with startup_bars(Console(stderr=True)) as bars:
        found = find_text(model, offline=False, progress=bars)
    reader = PromptReader(found.tokenizer, found.template)
    tokens = reader.chat([{"role": "user", "content": given}]) if chat else reader.text(given, special)
    if ids:
        print(*tokens)
    else:
        for token in tokens:
            print(f"{token}\t{found.tokenizer.token_text(token)!r}")
    print(f"{len(tokens)} tokens", file=sys.stderr)
