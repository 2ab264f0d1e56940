"""Commands on models: listing them, fetching them in advance, quantizing them, and showing their tokens."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from fd_core.cli.report import plain, reports_errors
from fd_core.cli.settings.flags import KEY_FLAGS, Given, takes_flags
from fd_core.errors import ConfigError

if TYPE_CHECKING:
    from fd_core.models.catalog import ListedModel
    from fd_core.models.loading.checkpoint import Checkpoint


app = typer.Typer(no_args_is_help=True, help="List models, or fetch them ahead of time.")

Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face model.")]
_TEMPLATES: Final = "additional_chat_templates"
_COPIED: Final = tuple(
    """
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json tokenizer.model vocab.json
    merges.txt generation_config.json chat_template.jinja chat_template.json LICENSE LICENSE.txt README.md
    """.split()
)


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
    console.print("Other models: a folder with safetensors, a .gguf file or a Hugging Face name.")


@app.command()
@reports_errors
def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="smollm2 or a Hugging Face name.")],
    revision: Revision = None,
) -> None:
    """Fetch MODEL into the cache and check it."""
    from fd_core.cli.serving.startup import startup_bars
    from fd_core.models.catalog import resolve_model

    with startup_bars() as bars:
        found = resolve_model(model, revision=revision, progress=bars)
    print(found.path)


@app.command()
@reports_errors
def export(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2, a folder, a .gguf file or a Hugging Face name.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that does not exist yet.")],
    revision: Revision = None,
) -> None:
    """Write the tokenizer, chat templates and configuration of MODEL to FOLDER, for tools such as transformers.

    Weights are not written; `fdcore quantize` writes a whole model.
    """
    import json

    from fd_core.cli.models.quantized_folder import new_folder
    from fd_core.cli.serving.startup import startup_bars
    from fd_core.models.catalog import resolve_model
    from fd_core.models.opening import open_checkpoint

    with startup_bars() as bars:
        found = resolve_model(model, revision=revision, progress=bars)
    with open_checkpoint(found.path) as checkpoint:
        config = json.dumps(dict(checkpoint.config), indent=2).encode()
        with new_folder(folder, {**companion_files(checkpoint), "config.json": config}, field="FOLDER"):
            pass
    print(folder)


@reports_errors
@takes_flags(KEY_FLAGS)
def ps(
    given: Given, url: Annotated[str, typer.Option(help="URL of the server.", metavar="URL")] = "http://127.0.0.1:8000"
) -> None:
    """Show the models of a running server, and its load."""
    import asyncio

    from rich.console import Console
    from rich.table import Table

    from fd_core.cli.chats.api_client import ApiClient, ServerAnswer
    from fd_core.cli.settings.settings import client_key
    from fd_core.server.schemas.responses import LoadAnswer

    async def ask() -> None:
        async with ApiClient(url, client_key(given, os.environ)) as api:
            models, load = await api.models(), None
            with contextlib.suppress(ServerAnswer):  # routers and other servers have no such path
                load = await api.get("/load", LoadAnswer)
        table = Table("Model", "From", "Context", "Server")
        for model in models:
            length = "" if model.max_model_len is None else f"{model.max_model_len:,}"
            table.add_row(*(plain(text) for text in (model.id, model.root or "", length, api.url)))
        console = Console()
        console.print(table)
        if load is not None:
            console.print(f"{load.running} requests running, {load.waiting} waiting")

    asyncio.run(ask())


@reports_errors
def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2, a folder, a .gguf file or a Hugging Face name.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="A folder that does not exist yet.")],
    form: Annotated[
        Literal["int8", "int4", "bfloat16"],
        typer.Option(
            "--format",
            help="int8 with a scale per row, int4 with a scale per 32 values, or bfloat16: no quantization at all.",
        ),
    ] = "int8",
    revision: Revision = None,
) -> None:
    """Write MODEL with quantized linear layers to FOLDER, in the format of compressed-tensors.

    Embeddings, norms, routers and the output projection are unchanged. With `--format bfloat16`, all weights are
    dequantized and rounded: a GGUF file becomes a folder for other engines. The folder appears when it is complete.
    """
    from fd_core.cli.models.quantized_folder import write_quantized
    from fd_core.cli.serving.startup import startup_bars
    from fd_core.models.catalog import resolve_model
    from fd_core.models.opening import open_checkpoint

    with startup_bars() as bars:
        found = resolve_model(model, revision=revision, progress=bars)
        with open_checkpoint(found.path) as checkpoint:
            others = companion_files(checkpoint)
            write_quantized(checkpoint, form, output, others, lambda done, total: bars("quantize", done, total))
    print(output)


def companion_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the tokenizer and the other files of a checkpoint: copied from a folder, or made from a GGUF file."""
    import json

    from fd_core.models.loading.files import read_limited
    from fd_core.text.tokenizer import load_tokenizer

    if checkpoint.path.is_dir():
        others = [f"{_TEMPLATES}/{path.name}" for path in sorted((checkpoint.path / _TEMPLATES).glob("*.jinja"))]
        return {name: read_limited(path) for name in (*_COPIED, *others) if (path := checkpoint.path / name).is_file()}
    tokenizer = load_tokenizer(checkpoint)
    default = {} if tokenizer.chat_template is None else {"default": tokenizer.chat_template}
    templates = [{"name": name, "template": text} for name, text in {**default, **tokenizer.named_templates}.items()]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": templates if tokenizer.named_templates else tokenizer.chat_template,
    }
    return {
        "tokenizer.json": tokenizer.backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
        "generation_config.json": json.dumps({"eos_token_id": list(checkpoint.eos_token_ids)}).encode(),
    }


@reports_errors
def tokenize(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Text to tokenize; by default standard input.")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A model's name, folder or .gguf file; `bytes` for the null backend.")
    ] = "smollm2",
    chat: Annotated[
        bool, typer.Option("--chat", help="Apply the model's chat template to the text as a user message.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print only the ids, on one line.")] = False,
    special: Annotated[
        bool, typer.Option(help="Add the model's special tokens, such as BOS; chat templates always include them.")
    ] = True,
) -> None:
    """Show the tokens of TEXT, one per line: id and text. The number of tokens is printed to standard error."""
    from fd_core.cli.serving.startup import startup_bars
    from fd_core.text.prompt_reader import PromptReader, find_text

    given = sys.stdin.read() if text is None else text
    with startup_bars() as bars:
        found = find_text(model, offline=False, progress=bars)
    reader = PromptReader(found.tokenizer, found.template)
    tokens = reader.chat([{"role": "user", "content": given}]).ids if chat else reader.text(given, special, "TEXT")
    if ids:
        print(*tokens)
    else:
        for token in tokens:
            print(f"{token}\t{found.tokenizer.token_text(token)!r}")
    print(f"{len(tokens)} tokens", file=sys.stderr)


def named_models() -> list[ListedModel]:
    """Return the models with a short name, those on this machine first; none of their files is read."""
    from fd_core.models.catalog import list_models

    return sorted(list_models(checked=False), key=lambda model: model.path is None)


def size_of(model: ListedModel) -> str:
    """Return the size of a model, and if it is local or has to be fetched."""
    return f"{model.size / 1e6:,.0f} MB, " + ("local" if model.path is not None else "fetched on first use")


def choose_model(command: str) -> str:
    """Return the model chosen at the terminal for `command`; `ConfigError` with the list if none was chosen."""
    models = named_models()
    if not _at_a_terminal():
        raise _none_named(command, models)
    try:
        chosen = _asked(models)
    except EOFError:
        print(file=sys.stderr)
        raise _none_named(command, models) from None
    print(f"next time: {command} {plain(shlex.quote(chosen))}", file=sys.stderr)
    return chosen


def _at_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _asked(models: Sequence[ListedModel]) -> str:
    from rich.console import Console
    from rich.prompt import Prompt
    from rich.text import Text

    console = Console(stderr=True)
    console.print("No model was specified. Choose one, or enter a folder, a .gguf file or a Hugging Face name.")
    for number, model in enumerate(models, 1):
        console.print(Text(f"  {number}  {model.name}  ({size_of(model)})"))
    while True:
        answer = Prompt.ask("Number or name", console=console, default="1").strip() or "1"
        if not answer.isdecimal():
            return answer
        if 1 <= int(answer) <= len(models):
            return models[int(answer) - 1].name
        console.print(f"{int(answer)} is not in the list.")


def _none_named(command: str, models: Sequence[ListedModel]) -> ConfigError:
    listed = "; ".join(f"{model.name} ({size_of(model)})" for model in models)
    hint = f"run `{command} {models[0].name}`, or use a folder, a .gguf file or a Hugging Face name"
    return ConfigError(f"no model was specified; available: {listed}", field="MODEL", hint=hint)
