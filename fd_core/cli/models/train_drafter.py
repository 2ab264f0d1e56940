"""Command `train-drafter`: train a head that drafts from hidden states of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fd_core.cli.report import plain, reports_errors
from fd_core.errors import ConfigError


@reports_errors
def train_drafter(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2, a folder, a .gguf file or a Hugging Face name.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the head; it must not exist yet.")],
    text: Annotated[
        list[Path], typer.Option("--text", help="File with text of the kind that the model will write; repeatable.")
    ],
    minutes: Annotated[float, typer.Option(min=0.01, help="Time to train.")] = 30.0,
    vocabulary: Annotated[
        int, typer.Option(min=1, help="Tokens that the head can draft: the most frequent ones of the texts.")
    ] = 8192,
    num_threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores by default.")] = None,
) -> None:
    """Train an EAGLE-3 head for MODEL on texts, for --speculative-config with the method eagle3.

    Every 16th sequence is held out; the acceptance rates that are printed at the end are those of such texts.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from fd_core.cli.serving.startup import startup_bars
    from fd_core.models.catalog import resolve_model

    if folder.exists():
        raise ConfigError(f"{folder} exists already", field="FOLDER", hint="name another folder")
    try:
        texts = [file.read_text("utf-8") for file in text]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"a text cannot be read: {error}", field="--text") from error
    try:
        from fd_core.engine.building.head_training import open_target, sequences_of, train_head
    except ImportError as error:
        raise ConfigError(f"training needs torch: {error}", hint="pip install 'fd-core[torch]'") from error
    with startup_bars() as bars:
        found = resolve_model(model, progress=bars)
    target, tokenizer = open_target(found.path, num_threads)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns) as bar:
        task = bar.add_task("first draft accepted: 0 %", total=1.0)
        trained = train_head(
            target,
            sequences_of(texts, tokenizer),
            folder,
            minutes=minutes,
            vocabulary=vocabulary,
            progress=lambda share, first: bar.update(
                task, completed=share, description=f"first draft accepted: {first:.0%}"
            ),
        )
    rates = ", ".join(f"{rate:.1%}" for rate in trained.acceptance)
    print(f"{trained.sequences} sequences; held-out texts accept drafts 1, 2, 3 at {rates} of positions")
    print(plain(f'serve with --speculative-config \'{{"method": "eagle3", "model": "{folder}"}}\''))
